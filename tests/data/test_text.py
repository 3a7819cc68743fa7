"""Per-user text: three layouts of one content, blocks, vocabulary, mail without quotes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from fedel.data.convert import own_words
from fedel.data.text import CLS, SEP, SPECIAL, UNK, Words, read_users, user_text
from fedel.errors import DataError

TEXTS = {
    "ann": " ".join(f"w{n % 7} and" for n in range(400)),
    "bob": " ".join(f"v{n % 5}" for n in range(150)),
    "cid": "too short",
}


def write(folder: Path, layout: str) -> Path:
    folder.mkdir(exist_ok=True)
    if layout == "txt":
        for user, text in TEXTS.items():
            (folder / f"{user}.txt").write_text(text)
        return folder
    if layout == "jsonl":
        lines = [json.dumps({"author": user, "text": text}) for user, text in TEXTS.items()]
    else:
        lines = ["author\ttext", *(f"{user}\t{text}" for user, text in TEXTS.items())]
    file = folder / f"all.{layout}"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize("layout", ["txt", "jsonl", "tsv"])
def test_every_layout_gives_the_same_text(tmp_path: Path, layout: str) -> None:
    assert TEXTS == read_users(write(tmp_path / "t", layout))


def test_blocks_are_cut_per_user_and_the_remainder_is_dropped(tmp_path: Path) -> None:
    data = user_text(write(tmp_path / "t", "txt"))
    assert ("ann", "bob") == data.user_names
    assert data.train.users is not None
    assert data.test.users is not None
    assert ([11, 2], [1]) == (np.bincount(data.train.users).tolist(), np.bincount(data.test.users).tolist())
    assert (14, 64) == (len(data.train) + len(data.test), data.train.x.shape[1])
    assert {CLS} == set(data.train.x[:, 0].tolist())
    assert {SEP} == set(data.train.x[:, -1].tolist())
    words = [data.classes[t] for t in data.train.x[0, 1:5]]
    assert ["w0", "and", "w1", "and"] == words


def test_a_batch_is_masked_and_the_test_set_is_the_same_each_time(tmp_path: Path) -> None:
    data = user_text(write(tmp_path / "t", "txt"))
    x, y = data.train_batch(np.arange(10), np.random.default_rng(0))
    assert (np.int64, np.int64, (10, 64)) == (x.dtype, y.dtype, x.shape)
    assert 0.05 < (y != -100).mean() < 0.3
    first, second = (next(data.test_batches()) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_vocabulary_is_by_frequency_then_alphabet_and_survives_saving(tmp_path: Path) -> None:
    words = Words.build(["b a c", "b a", "b"], size=len(SPECIAL) + 2)
    assert (*SPECIAL, "b", "a") == words.pieces
    assert [5, UNK, 6] == words.encode("B c A")
    words.save(tmp_path / "vocabulary.txt")
    assert words == Words.load(tmp_path / "vocabulary.txt")
    assert words.pieces[:6] == Words.load(tmp_path / "vocabulary.txt", 6).pieces


def test_a_vocabulary_beside_the_text_is_used(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", "txt")
    Words.build(["and and"]).save(folder / "vocabulary.txt")
    data = user_text(folder)
    assert (*SPECIAL, "and") == data.classes
    (folder / "vocabulary.txt").write_text("what\never\n")
    with pytest.raises(DataError, match=r"vocabulary.txt: does not begin with \[PAD\]"):
        user_text(folder)


def test_a_local_sentence_piece_model(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text("\n".join(TEXTS.values()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus"), model_prefix=str(tmp_path / "spiece"), vocab_size=24, minloglevel=2,
        pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, control_symbols=["[CLS]", "[SEP]", "[MASK]"],
    )  # fmt: skip
    data = user_text(write(tmp_path / "t", "txt"), tokenizer=tmp_path)
    assert ("[CLS]", "[SEP]", "[MASK]") == data.classes[2:5]
    assert data.train.x[:, 1:-1].min() > 4
    with pytest.raises(DataError, match=r"spiece.model: missing"):
        user_text(tmp_path / "t", tokenizer=tmp_path / "t")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"author": "x"}\n', "a.jsonl, line 1: expected"),
        ("a.tsv", b"x\ty\tz\n", "a.tsv, line 1: expected author<TAB>text, found 3"),
        ("a.jsonl", b"\xff\xfe", "a.jsonl: not UTF-8"),
        ("a.jsonl", b'{"author": "x", "text": "few words"}\n', "no user has 20 words"),
    ],
)
def test_damage_names_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        user_text(tmp_path / name)


def test_mail_keeps_only_what_the_author_wrote() -> None:
    body = "On Monday Ann wrote:\n> old\n| older\nAL> oldest\nNew words to bob@example.org\n-- \nBob, Ltd."
    assert own_words(body) == "New words to"
