"""Replays a run from what its servers keep on disk, and names what is damaged, missing or against the rules."""
