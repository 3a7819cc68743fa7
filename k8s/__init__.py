"""Manifests for Kubernetes, and the one of them that is made from other files."""
