"""Turns the directory of a run into one self-contained page with pictures, and the same as Markdown."""
