"""Keeps the model, takes masked updates, and folds them into the next version."""
