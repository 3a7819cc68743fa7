"""Agents as rows of a table, as JSON, and one of them with everything that is known."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len

from fedel.roles.gate import clean, clean_lines
from fedel.v1 import coordinator_pb2 as pb

COLUMNS = ("name", "state", "seen", "device", "version", "memory", "up, down", "certificate", "labels", "error")
NUM_SHORT = 5
"""Columns that every screen has room for; the others go below them where they do not fit."""
MAX_ERROR = 120
"""Letters of an error in a row; ``fedel fleet show`` has all of it."""


def table_lines(agents: Sequence[pb.AgentStatus], now: float, width: int) -> list[str]:
    """One line per agent; a few where the ``width`` of a screen (0: none) is too small. Names stay whole."""
    rows = [cells(agent, now) for agent in agents]
    lines = aligned([COLUMNS, *rows])
    if not width or max(map(cell_len, lines)) <= width:
        return lines
    short = aligned([COLUMNS[:NUM_SHORT], *(row[:NUM_SHORT] for row in rows)])
    found = short[:1]
    for line, row in zip(short[1:], rows, strict=True):
        told = [
            f"{name} {cell}"
            for name, cell in zip(COLUMNS, row, strict=True)
            if name in ("memory", "certificate")
        ]
        *_, link, _, labels, error = row
        more = [labels, *told, f"up, down {link}"]
        found.append(line)
        for text in ("; ".join(text for text in more if not text.endswith("-")), error):
            if text != "-":
                found += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    return found


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell + " " * (wide - cell_len(cell)) for cell, wide in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def cells(agent: pb.AgentStatus, now: float) -> list[str]:
    error = agent.last_error
    rates = " ".join((amount(agent.up_rate, "/s"), amount(agent.down_rate, "/s")))
    texts = (
        agent.name,
        agent.state,
        age(now - agent.last_seen),
        agent.device_type or "-",
        agent.agent_version or "-",
        amount(agent.memory_bytes),
        rates if agent.up_rate or agent.down_rate else "-",
        _left(agent.certificate_end, now),
        labels_text(agent.labels),
        f"{age(now - error.at)} ago{_about(error)}: {clean(error.message, MAX_ERROR)}" if error.at else "-",
    )
    return [clean(text) for text in texts]


def details(agent: pb.AgentStatus, now: float) -> str:
    """Everything about one agent."""
    error = agent.last_error
    own = {key: value for key, value in agent.labels.items() if key not in agent.operator_labels}
    lines = {
        "agent": agent.name,
        "state": agent.state + (", cordoned" if agent.cordoned else ""),
        "last seen": f"{age(now - agent.last_seen)} ago",
        "runs": ", ".join(agent.runs) or "-",
        "device": agent.device_type or "-",
        "memory": amount(agent.memory_bytes),
        "up": amount(agent.up_rate, "/s"),
        "down": amount(agent.down_rate, "/s"),
        "version": f"{agent.agent_version or '-'}, protocol {agent.protocol}",
        "certificate": _left(agent.certificate_end, now) + (" left" if agent.certificate_end > now else ""),
        "its labels": labels_text(own),
        "operator's labels": labels_text(agent.operator_labels),
    }
    said = [f"{name + ':':<18} {clean(text)}" for name, text in lines.items()]
    if not error.at:
        return "\n".join([*said, "last error:        none"])
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(error.at))
    said.append(f"last error:        {at}{_about(error)}: {clean(error.message)}")
    return "\n".join([*said, "", clean_lines(error.trace).rstrip()] if error.trace else said)


def to_table(agent: pb.AgentStatus) -> dict[str, Any]:
    """For scripts, with the names that the HTTP interface has."""
    error = agent.last_error
    return {
        "name": agent.name,
        "state": agent.state,
        "connected": agent.connected,
        "cordoned": agent.cordoned,
        "last_seen": agent.last_seen,
        "device_type": agent.device_type,
        "agent_version": agent.agent_version,
        "protocol": agent.protocol,
        "memory_bytes": agent.memory_bytes or None,
        "up_bytes_per_second": agent.up_rate or None,
        "down_bytes_per_second": agent.down_rate or None,
        "certificate_end": agent.certificate_end or None,
        "labels": dict(sorted(agent.labels.items())),
        "operator_labels": dict(sorted(agent.operator_labels.items())),
        "runs": list(agent.runs),
        "last_error": None
        if not error.at
        else {
            "at": error.at,
            "run": error.run,
            "round": error.round_num if error.round_num >= 0 else None,
            "message": error.message,
            "trace": error.trace,
        },
    }


def labels_text(labels: Any) -> str:
    """
    >>> labels_text({"site": "roof", "gpu": "orin"})
    'gpu=orin,site=roof'
    """
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or "-"


def age(seconds: float) -> str:
    """
    >>> [age(seconds) for seconds in (-1, 59, 600, 7200, 1e6)]
    ['0 s', '59 s', '10 min', '2 h', '12 d']
    """
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{max(0, round(seconds / size))} {unit}"
    return f"{round(seconds / 86_400)} d"


def _left(end: float, now: float) -> str:
    if not end:
        return "-"
    return age(end - now) if end > now else "expired"


def amount(num_bytes: float, per: str = "") -> str:
    """
    >>> amount(8.2e9), amount(1_250_000, "/s"), amount(0)
    ('8.2 GB', '1.2 MB/s', '-')
    """
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}{per}"
    return "-"


def _about(error: pb.AgentError) -> str:
    where = f", {error.run}" if error.run else ""
    return where + (f", round {error.round_num + 1}" if error.round_num >= 0 else "")
