"""One file per idea of the paper; numpy only."""
