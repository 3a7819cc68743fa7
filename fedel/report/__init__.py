"""What a run's directory tells, as one self-contained page with pictures and a Markdown twin."""
