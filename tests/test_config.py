from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedel import config
from fedel.errors import ConfigError
from fedel.types import LocalWork


@dataclass(frozen=True)
class Outer:
    name: str
    work: LocalWork = field(default_factory=LocalWork)
    sizes: tuple[int, ...] = ()
    limit: float | None = None
    place: Path = Path()


def test_tables_become_nested_dataclasses():
    made = config.parse(Outer, {"name": "x", "work": {"lr": 1}, "sizes": [1, 2], "place": "a/b"}, "f.toml")
    assert Outer("x", LocalWork(lr=1.0), (1, 2), None, Path("a/b")) == made


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"nme": "x"}, ["f.toml", "'nme'", "did you mean 'name'"]),
        ({}, ["f.toml", "'name' is missing"]),
        ({"name": 3}, ["f.toml: name = 3", "expected str, not int"]),
        ({"name": "x", "work": {"lr": "fast"}}, ["f.toml: work: lr = 'fast'", "expected float"]),
        ({"name": "x", "work": {"momentun": 1}}, ["f.toml: work", "did you mean 'momentum'"]),
        ({"name": "x", "sizes": [1, "b"]}, ["f.toml: sizes", "expected int"]),
        ({"name": "x", "limit": True}, ["f.toml: limit = True", "expected float"]),
    ],
)
def test_errors_name_the_file_the_key_and_the_remedy(table, words):
    with pytest.raises(ConfigError) as error:
        config.parse(Outer, table, "f.toml")
    for word in words:
        assert word in str(error.value)


def test_overrides_win_over_the_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[work]\nlr = 0.1\n")
    table = config.read(path, ["work.lr=0.01", "work.optimiser=adamw", "model.width=0.25"])
    assert {"work": {"lr": 0.01, "optimiser": "adamw"}, "model": {"width": 0.25}} == table


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    path.write_bytes(b"# " + b"x" * 5_000_000)
    with pytest.raises(ConfigError, match=r"large\.toml: 5 MB are too much for a configuration; at most 4 MB"):
        config.read(path)


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: no such"):
        config.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("lr = = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
        config.read(tmp_path / "bad.toml")


@pytest.mark.parametrize("override", ["lr", "=1", "work.lr.x=1"])
def test_a_malformed_override_is_refused(override):
    with pytest.raises(ConfigError, match="--set"):
        config.override_key({"work": {"lr": 0.1}}, override)


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"a": 1, "b": 0.5, "c": True, "d": 'quo"te\\ \n', "e": [1, 2], "f": ["x"], "h": float("inf")},
        {"deep": {"er": {"est": 1}, "flat": 2}, "top": 3},
        {"beyond 16 bits": "\U0001f600", "del": "\x7f", "é": 1},
        {"odd key": {"sp ace": 1}, "empty": {}, "list": [{"a": 1}, {"b": [1, 2]}]},
    ],
)
def test_what_is_written_is_read_back(tmp_path, table):
    (tmp_path / "t.toml").write_text(config.write(table))
    assert table == config.read(tmp_path / "t.toml")


def test_what_has_no_value_is_left_out(tmp_path):
    (tmp_path / "t.toml").write_text(config.write({"a": None, "b": {"c": None, "d": 1}}))
    assert {"b": {"d": 1}} == config.read(tmp_path / "t.toml")


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000])
def test_a_number_of_thousands_of_digits_is_named(tmp_path: Path, number: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"lr = {number}\nnum_steps = {number}\noptimiser = {number}\n")
    with pytest.raises(ConfigError):
        config.parse(LocalWork, config.read(file), str(file))
    file.write_text(f"optimiser = {number}\n")
    with pytest.raises(ConfigError):
        config.parse(LocalWork, config.read(file), str(file))
