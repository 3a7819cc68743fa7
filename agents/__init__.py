"""The processes on devices."""
