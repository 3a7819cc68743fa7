"""Drills: a federation of its own is disturbed, and must end as if nothing had happened."""
