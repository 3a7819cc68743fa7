"""Every model is a list of blocks with an early exit after each."""
