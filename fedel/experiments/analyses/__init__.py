"""One function an experiment: from the runs that are there to a section of the report."""
