"""Text that belongs to users, cut into blocks for masked-language modelling (paper, section 5.1, Reddit)."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np

from fedel import plugins
from fedel.data.dataset import Dataset, Split
from fedel.data.files import listed
from fedel.data.transforms import MaskedTokens
from fedel.errors import DataError
from fedel.serialisation import parse_json

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""In the order of ALBERT's vocabulary."""
UNK, CLS, SEP, MASK = 1, 2, 3, 4
VOCABULARY = "vocabulary.txt"
MIN_WORDS = 20
_WORD = re.compile(r"\w+(?:'\w+)?|[^\w\s]")


class Tokenizer(Protocol):
    @property
    def pieces(self) -> tuple[str, ...]: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Words:
    """Lower-case words and punctuation marks, numbered by frequency after the special tokens."""

    pieces: tuple[str, ...]

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(word, UNK) for word in split_words(text)]

    @classmethod
    def build(cls, texts: Iterable[str], size: int = 30_000) -> Words:
        """The most frequent words, ``size`` including the special tokens; ties in alphabetical order."""
        counts = Counter(word for text in texts for word in split_words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls((*SPECIAL, *ranked[: size - len(SPECIAL)]))

    @classmethod
    def load(cls, path: Path, size: int = 30_000) -> Words:
        """The first ``size`` entries of a file that ``save`` wrote, including the special tokens."""
        pieces = tuple(_read(path).split("\n")[:-1][:size])
        if pieces[: len(SPECIAL)] != SPECIAL:
            raise DataError(
                f"{path}: does not begin with {' '.join(SPECIAL)}; delete the file, it will be made again"
            )
        return cls(pieces)

    def save(self, path: Path) -> None:
        path.write_text("".join(f"{piece}\n" for piece in self.pieces), encoding="utf-8")


class Pieces:
    """A local ALBERT sentence-piece model: a directory with ``spiece.model``, or the file itself."""

    def __init__(self, path: Path) -> None:
        file = path / "spiece.model" if path.is_dir() else path
        if not file.exists():
            raise DataError(f"{file}: missing; give a directory with ALBERT's spiece.model, or no tokenizer")
        try:
            self._model = import_module("sentencepiece").SentencePieceProcessor(model_file=str(file))
        except ImportError as problem:
            raise DataError("a sentence-piece tokenizer needs `pip install sentencepiece`") from problem
        except (OSError, RuntimeError) as problem:
            raise DataError(f"{file}: not a sentence-piece model ({problem})") from problem
        self.pieces = tuple(self._model.id_to_piece(n) for n in range(self._model.get_piece_size()))
        if self.pieces[CLS : MASK + 1] != SPECIAL[CLS : MASK + 1]:
            raise DataError(
                f"{file}: pieces 2 to 4 are {self.pieces[2:5]}, not [CLS] [SEP] [MASK]; is it ALBERT's?"
            )

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text.lower()))


def split_words(text: str) -> list[str]:
    """
    >>> split_words("Don't panic, Arthur.")
    ["don't", 'panic', ',', 'arthur', '.']
    """
    return _WORD.findall(text.lower())


def user_text(
    path: Path,
    *,
    name: str = "text",
    tokenizer: str | Path | None = None,
    block_size: int = 64,
    vocab_size: int = 30_000,
    test_share: float = 0.1,
) -> Dataset:
    """A directory with one ``.txt`` per user, or a ``.jsonl`` / ``.tsv`` of author and text.

    Users with fewer than 20 words are dropped. The last ``test_share`` of the blocks of every user with ten
    or more is the test set. The vocabulary is the start of ``vocabulary.txt`` next to the text, if it exists.
    """
    texts = {user: text for user, text in read_users(path).items() if len(text.split()) >= MIN_WORDS}
    if not texts:
        raise DataError(f"{path}: no user has {MIN_WORDS} words or more")
    folder = path if path.is_dir() else path.parent
    encoder: Tokenizer
    if tokenizer is not None:
        encoder = Pieces(plugins.path_of(tokenizer, "tokenizer", DataError))
    elif (folder / VOCABULARY).exists():
        encoder = Words.load(folder / VOCABULARY, vocab_size)
    else:
        encoder = Words.build(texts.values(), vocab_size)
    return _blocks_dataset(name, path, texts, encoder, block_size, test_share)


def _blocks_dataset(
    name: str, path: Path, texts: Mapping[str, str], encoder: Tokenizer, block_size: int, test_share: float
) -> Dataset:
    body = block_size - 2
    dtype = np.uint16 if len(encoder.pieces) < 2**16 else np.int32
    names, train, test = [], [], []
    for user, text in sorted(texts.items()):
        tokens = encoder.encode(text)
        count = len(tokens) // body
        if count == 0:
            continue
        blocks = np.empty((count, block_size), dtype)
        blocks[:, 0], blocks[:, -1] = CLS, SEP
        blocks[:, 1:-1] = np.asarray(tokens[: count * body], dtype).reshape(count, body)
        held_out = int(count * test_share) if count >= 10 else 0
        train.append(blocks[: count - held_out])
        test.append(blocks[count - held_out :])
        names.append(user)
    if not sum(map(len, test)):
        raise DataError(
            f"{path}: no user has ten blocks of {body} tokens to test on; provide more text per user"
        )
    parts = []
    for blocks_of in (train, test):
        x = np.concatenate(blocks_of)
        parts.append(Split(x, x, np.repeat(np.arange(len(names)), [len(b) for b in blocks_of])))
    masking = MaskedTokens(len(encoder.pieces), MASK, tuple(range(len(SPECIAL))))
    return Dataset(name, "text", parts[0], parts[1], encoder.pieces, masking, tuple(names))


def read_users(path: Path) -> dict[str, str]:
    """User -> all text of that user, in its original order."""
    if not path.exists():
        raise DataError(
            f"{path}: missing; give a directory with one file per user, or a .jsonl / .tsv of author and text"
        )
    if path.is_dir():
        table = next((path / f for f in ("users.jsonl", "users.tsv") if (path / f).exists()), None)
        if table is None:
            return {p.stem: _read(p) for p in listed(path, "*.txt") if p.name != VOCABULARY}
        path = table
    gathered: dict[str, list[str]] = {}
    for author, text in _rows(path):
        gathered.setdefault(author, []).append(text)
    return {author: "\n".join(parts) for author, parts in gathered.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{path}: not UTF-8 text ({problem.reason} at byte {problem.start}); convert it"
        ) from problem


def _rows(path: Path) -> Iterable[tuple[str, str]]:
    lines = _read(path).split("\n")
    if path.suffix == ".tsv":
        for number, row in enumerate(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
            if row and len(row) != 2:
                raise DataError(f"{path}, line {number}: expected author<TAB>text, found {len(row)} fields")
            if row and row != ["author", "text"]:
                yield row[0], row[1]
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = parse_json(line)
                yield str(record["author"]), str(record["text"])
            except (ValueError, KeyError, TypeError) as problem:
                raise DataError(f'{path}, line {number}: expected {{"author": ..., "text": ...}}') from problem
