"""Keeps the model, receives masked updates, and folds them into the next version."""
