"""Certificates, identities and the rights of each role; nothing here opens a connection."""
