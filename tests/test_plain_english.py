"""Our texts do not use some words that are hard to read for people whose first language is another."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("*.md", "*.py", "*.proto", "*.toml", "*.html", "*.js", "*.yaml", "*.yml", "*.sh")
GENERATED = ("docs/results.md", "fedel/v1/")
"""Their texts come from other files, which are checked."""
QUOTED = "# quoted"
"""Ends a line that names such a word on purpose."""

AVOID = {
    "so manieth": "every n-th",  # quoted
    "every so many": "every n-th",  # quoted
    "at most so many": "up to",  # quoted
    "so many seconds": "this many seconds",  # quoted
    "whence": "from where",  # quoted
    "anew": "again",  # quoted
    "pardons": "un-revokes",  # quoted
    "told of": "listed, reported",  # quoted
    "for want of": "because there is no",  # quoted
    "to be had": "available",  # quoted
    "stands still": "is idle, does not move",  # quoted
    "stand still": "be idle, not move",  # quoted
    "stood still": "was idle, did not move",  # quoted
    "of now": "current",  # quoted
    "whoever": "anyone who",  # quoted
    "somebody stands": "say what happened",  # quoted
    "in the words of": "rewritten to",  # quoted
    "is no json": "is not valid JSON",  # quoted
    "one's own": "your own",  # quoted
    "on the mean": "on average",  # quoted
    "how it fares": "its state",  # quoted
    "a row a": "one row per",  # quoted
    "a line a": "one line per",  # quoted
    "a file a": "one file per",  # quoted
    "a round a": "per round and",  # quoted
}
"""What we do not write, in lower case -> what we write instead."""

PATTERN = re.compile(r"\b(" + "|".join(map(re.escape, AVOID)) + r")\b", re.IGNORECASE)


def found_in(text: str) -> list[tuple[int, str]]:
    """Line number and word of everything in ``text`` that we do not write."""
    return [
        (number, match.group(1).lower())
        for number, line in enumerate(text.splitlines(), 1)
        if not line.rstrip().endswith(QUOTED)
        for match in PATTERN.finditer(line)
    ]


def test_finds_words_and_skips_quotes():
    assert [(1, "anew"), (2, "whoever")] == found_in("profile anew\nWhoever has it\nrenewed\n")  # quoted
    assert [] == found_in('"anew"  # quoted')  # quoted


def test_texts_use_plain_english():
    tracked = subprocess.run(
        ["git", "ls-files", "-z", *FILES], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    hits = [
        f"{name}:{number}: '{word}'; write '{AVOID[word]}'"
        for name in tracked
        if name and not name.startswith(GENERATED) and (ROOT / name).is_file()
        for number, word in found_in((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert not hits, "\n" + "\n".join(hits)
