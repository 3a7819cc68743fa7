"""``fedel preflight``: checks whether a device is ready to train, before a run depends on it."""
