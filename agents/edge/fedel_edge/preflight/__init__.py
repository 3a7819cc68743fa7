"""``fedel preflight``: whether a device is ready to train, before a run finds out that it is not."""
