"""Labels of agents, and the selectors that choose agents by them: ``gpu=orin,site!=lab``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

BUILT_IN = ("name", "device")
"""Keys that every agent has: its name and its device type. No label has one of these names."""
MAX_LABELS = 32
"""Of one device, and of its operator."""
MAX_SELECTOR = 1000
"""Letters."""
_KEY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"[^\s,=!]([^,=!\n]{0,198}[^\s,=!])?")
_FORMS = "write key=value, key!=value, key or !key, with commas between them"


@dataclass(frozen=True)
class Term:
    """One condition; without a value it is about the key alone."""

    key: str
    value: str | None
    wanted: bool

    def matches(self, facts: Mapping[str, str]) -> bool:
        holds = self.key in facts if self.value is None else facts.get(self.key) == self.value
        return holds == self.wanted


@dataclass(frozen=True)
class Selector:
    """All terms must hold; without any, every agent matches.

    >>> selector = Selector.parse("gpu=orin, site!=lab, !broken")
    >>> selector.matches("a", "jetson", {"gpu": "orin", "site": "roof"})
    True
    >>> selector.matches("b", "jetson", {"gpu": "orin", "site": "lab"})
    False
    >>> selector.matches("c", "jetson", {"gpu": "orin", "broken": "yes"})
    False
    >>> Selector.parse("device=jetson,name!=a").matches("a", "jetson", {})
    False
    """

    terms: tuple[Term, ...] = ()

    @staticmethod
    def parse(text: str) -> Selector:
        """``ValueError`` says what is wrong."""
        if len(text) > MAX_SELECTOR:
            raise ValueError(f"the selector has {len(text)} letters, more than {MAX_SELECTOR}")
        return Selector(tuple(map(_term, text.split(",")))) if text.strip() else Selector()

    def matches(self, name: str, device_type: str, labels: Mapping[str, str]) -> bool:
        facts = {**labels, "name": name, "device": device_type}
        return all(term.matches(facts) for term in self.terms)


def _term(text: str) -> Term:
    text = text.strip()
    key, unequal, value = text.partition("!=")
    equal = ""
    if not unequal:
        key, equal, value = text.partition("=")
    is_about_key = not unequal and not equal
    wanted = not unequal and not (is_about_key and key.startswith("!"))
    key, value = key.removeprefix("!").strip() if is_about_key else key.strip(), value.strip()
    if not _KEY.fullmatch(key) or (not is_about_key and not _VALUE.fullmatch(value)):
        raise ValueError(f"'{text}' is no condition: {_FORMS}")
    return Term(key, None if is_about_key else value, wanted)


def objection_to_labels(labels: Mapping[str, str]) -> str:
    """What is wrong with labels, for people; empty if nothing is.

    >>> objection_to_labels({"gpu": "orin"})
    ''
    >>> objection_to_labels({"name": "x"})
    "label 'name': this key is taken by the agent's own name; choose another"
    """
    if len(labels) > MAX_LABELS:
        return f"{len(labels)} labels, more than {MAX_LABELS}"
    for key, value in labels.items():
        if not _KEY.fullmatch(key):
            return (
                f"label {key[:70]!r}: a key has 1 to 63 letters, digits, dots, dashes, slashes and underscores,"
                " and begins and ends with a letter or digit"
            )
        if key in BUILT_IN:
            whose = "name" if key == "name" else "device type"
            return f"label '{key}': this key is taken by the agent's own {whose}; choose another"
        if not (_VALUE.fullmatch(value) and value.isprintable()):
            return f"label '{key}': its value has 1 to 200 letters, without commas, = and !"
    return ""
