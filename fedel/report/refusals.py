"""Updates that did not count, by reason: many clients fail for the same one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from fedel.records import RoundRecord

MAX_NAMES = 3
_ABOUT_CLIENT = re.compile(r"^the report of client '[^']*': ")
_DETAIL = re.compile(r"'[^']*'|\b(?:nan|inf)\b|[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
"""What differs between two updates that were refused for one reason: names and numbers."""


@dataclass
class Reason:
    """Why updates did not count."""

    text: str
    """As the first update was refused."""
    clients: list[str] = field(default_factory=list)
    """One for each update."""
    rounds: list[int] = field(default_factory=list)
    """Counted from 0, as in the records."""

    @property
    def who(self) -> str:
        """The first few clients."""
        names = list(dict.fromkeys(self.clients))
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        return ", ".join(names[:MAX_NAMES]) + more

    @property
    def when(self) -> str:
        """Its rounds, counted from 1."""
        first, last = self.rounds[0] + 1, self.rounds[-1] + 1
        return f"round {first}" if first == last else f"rounds {first} to {last}"

    @property
    def sentence(self) -> str:
        count = len(self.clients)
        return f"{count} {'update' if count == 1 else 'updates'} did not count ({self.who}): {self.text}"


def reasons(records: Iterable[RoundRecord]) -> list[Reason]:
    """The most frequent first. Clients that dropped out of a simulated round count too."""
    found: dict[str, Reason] = {}
    for record in records:
        silent = dict.fromkeys(record.dropped, "no update came: the client dropped out (simulated)")
        for client, why in sorted({**silent, **record.refused}.items()):
            text = _ABOUT_CLIENT.sub("", why)
            reason = found.setdefault(_DETAIL.sub("#", text), Reason(text))
            reason.clients.append(client)
            reason.rounds.append(record.round)
    return sorted(found.values(), key=lambda reason: -len(reason.clients))


class NewReasons:
    """For a screen: each reason is said in the round in which it first comes up."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, record: RoundRecord) -> list[str]:
        lines = [record.trouble] if record.trouble else []
        for reason in reasons([record]):
            key = _DETAIL.sub("#", reason.text)
            if key not in self._known:
                self._known.add(key)
                lines.append(reason.sentence)
        return lines


def count_said(record: RoundRecord) -> str:
    """How many updates of a round counted, of how many tasks."""
    lost = len(record.refused)
    counted = f"{record.num_updates}/{record.num_tasks} updates{record.late_note}"
    return counted + (f" ({lost} did not count)" if lost else "")
