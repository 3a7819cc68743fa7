"""Every message that docs/troubleshooting.md quotes is in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
CODE = ("fedel", "services", "agents")
ANY = "\0"
"""Stands for what a message fills in."""
ROW = re.compile(r"^\| `(.+?)` \| ", re.MULTILINE)
LEAST_LETTERS = 12
"""Of a message, without what differs: less would be found anywhere."""


def text_of(node: ast.AST) -> str | None:
    """A text as it is written in the code; f-strings and %-forms with ``ANY`` for what they fill in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]", ANY, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or ANY for part in node.values)
    return None


@cache
def texts() -> list[str]:
    paths = [path for folder in CODE for path in (ROOT / folder).rglob("*.py") if "/v1/" not in str(path)]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [text for node in nodes if (text := text_of(node))]


def is_said(message: str) -> bool:
    """Whether a text of the code has the message's words in their order, and fills in where it has dots."""
    words = [re.escape(word) for word in message.split("...")]
    pattern = re.compile(f"[^{ANY}]*{ANY}.*?".join(words).replace(r"\ ", "[ ]"), re.DOTALL)
    return any(pattern.search(text) for text in texts())


def messages() -> list[str]:
    return ROW.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("message", messages())
def test_the_code_says_this(message: str) -> None:
    assert len(message.replace("...", "")) >= LEAST_LETTERS, "it could be any message"
    assert is_said(message)


def test_every_row_is_looked_up() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    heads = sum(line.startswith("| message |") for line in rows)
    assert len(rows) - heads == len(messages()) > 30


@pytest.mark.parametrize(
    "message", ["the moon is at round ...", "cannot listen on the moon", "waits for ... more moons"]
)
def test_a_message_that_nobody_says_is_noticed(message: str) -> None:
    assert not is_said(message)
