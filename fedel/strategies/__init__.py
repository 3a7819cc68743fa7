"""One method a file, all three parts in it: plan, fit, fold."""
