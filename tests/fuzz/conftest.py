"""``coverage_guided.py`` is a program that needs atheris; ``campaign.py`` starts it."""

collect_ignore = ["coverage_guided.py"]
