"""One function per experiment: turns the existing runs into a section of the report."""
