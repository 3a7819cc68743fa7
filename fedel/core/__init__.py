"""One idea of the paper a file; numpy only."""
