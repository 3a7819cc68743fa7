"""Which processes work together: each names the number of the messages that it speaks when a session begins."""

from __future__ import annotations

PROTOCOL = 1
"""Grows when an older process would misread a message, or miss one that it must follow. New fields that an
older process may leave out do not change it."""
WORKS_WITH = (1,)
"""A process of this version works with these. 0 is one from before the number was sent (FedEL 0.1.0 and its
development versions)."""


def objection(role: str, protocol: int, version: str, own_role: str, own_version: str) -> str:
    """Why a process cannot work with the one on the other side, and what to upgrade; empty if it can.

    >>> objection("agent", PROTOCOL, "0.1.0", "coordinator", "0.1.0")
    ''
    >>> objection("agent", 0, "0.1.0", "coordinator", "0.2.0").partition(": ")[2]
    'upgrade the agent to the version of the coordinator'
    >>> objection("agent", 9, "0.9.0", "coordinator", "0.2.0").partition(": ")[2]
    'upgrade the coordinator to the version of the agent'
    """
    if protocol in WORKS_WITH:
        return ""
    older, newer = (role, own_role) if protocol < PROTOCOL else (own_role, role)
    works = ", ".join(map(str, WORKS_WITH))
    return (
        f"the {role} (FedEL {version or 'of unknown version'}) speaks protocol {protocol}, this {own_role}"
        f" (FedEL {own_version}) speaks {PROTOCOL} and works with {works}: upgrade the {older}"
        f" to the version of the {newer}"
    )
