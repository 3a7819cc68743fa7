"""Data sets in their official formats, fetching and checking them, and splitting them among clients."""
