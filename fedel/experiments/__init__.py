"""Every table and figure of the paper: the runs it needs, and what comes of them beside the paper's numbers."""
