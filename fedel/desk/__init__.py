"""What a person's machine does for a run: starts a federation, creates and follows runs, shows them."""
