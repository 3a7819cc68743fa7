"""Certificates, identities and what each role may do: no sockets here."""
