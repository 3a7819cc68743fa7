"""The tables and figures of the paper: the runs that each needs, and our results next to the paper's."""
