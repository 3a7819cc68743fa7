"""Other systems under the same load, from PyPI, each in a virtual environment of its own."""
