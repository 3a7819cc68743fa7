"""The ``fedel`` command: argument parsing and screens, nothing else."""
