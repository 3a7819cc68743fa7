"""Backups of a federation: database, aggregators and authority as they were at one moment; and the way back."""
