"""A few cases of every target, the kept ones among them; and that the fuzzing itself sees what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import campaign, frames
from tests.fuzz.batch import Finding, Summary
from tests.fuzz.hostile_servers import HOSTILE_SERVERS
from tests.fuzz.mutate import json_case, message_case, toml_case
from tests.fuzz.rpc import METHODS, RPCS, valid
from tests.fuzz.target import CORPUS, Target
from tests.fuzz.targets import CODEC, TARGETS

QUICK_RPCS = ("rpc_PutUpdate", "rpc_Session", "tls_GetModel")
BAD_READERS = """
import json, sys
from dataclasses import asdict
from tests.fuzz.batch import run
from tests.fuzz.target import Target

def read(data):
    kind = data[:1]
    if kind == b"v":
        raise ValueError
    if kind == b"s":
        while True:
            pass
    if kind == b"m":
        return bytes(10**10)

target = Target("bad", lambda: [b"v", b"s", b"m", b"fine"], None, lambda _: read, seconds=0.2)
print(json.dumps(asdict(run(target, 1, 0, 4))))
"""


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_accepted(tmp_path: Path, name: str) -> None:
    target = TARGETS[name]
    read = target.prepare(tmp_path)
    for seed in target.seeds():
        read(seed)


def test_no_reader_raises_anything_else() -> None:
    results = campaign.run_targets(list(TARGETS), cases=60, seed=1)
    assert list(TARGETS) == [result.summary.target for result in results]
    assert {} == {r.summary.target: r.findings for r in results if not r.clean or r.summary.cases < 60}


@pytest.mark.parametrize("name", QUICK_RPCS)
def test_servers_survive_hostile_calls(name: str) -> None:
    result = campaign.run_rpc(name, cases=60, seed=1)
    assert (60, []) == (result.summary.cases, result.findings)


@pytest.mark.parametrize("name", HOSTILE_SERVERS)
def test_agents_survive_hostile_servers(name: str) -> None:
    result = campaign.run_rpc(name, cases=20, seed=1)
    assert (20, []) == (result.summary.cases, result.findings)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RPCS, *HOSTILE_SERVERS])
def test_servers_survive_many_hostile_calls(name: str) -> None:
    result = campaign.run_rpc(name, cases=1_000, seed=2)
    assert (1_000, []) == (result.summary.cases, result.findings)


def test_every_rpc_is_a_target() -> None:
    fuzzed = {rpc.method.name for rpc in RPCS.values()}
    assert fuzzed == METHODS.keys()
    for method in METHODS:
        assert valid(method, "client")


def test_names_of_the_corpus_exist() -> None:
    names = TARGETS.keys() | RPCS.keys()
    assert {path.name for path in CORPUS.iterdir()} <= names
    assert set(CODEC) <= names


@pytest.mark.parametrize("name", [*CODEC, "job", "profile", "idx"])
def test_a_case_is_the_same_every_time(name: str) -> None:
    made = TARGETS[name]
    again = Target(made.name, made.seeds, made.mutate, made.prepare)
    assert [made.case(7, n) for n in range(50)] == [again.case(7, n) for n in range(50)]
    assert len({made.case(7, n) for n in range(50)}) > 30


def test_bad_readers_are_noticed() -> None:
    """One that raises, one that never ends, one that takes all memory."""
    done = subprocess.run([sys.executable, "-c", BAD_READERS], capture_output=True, text=True, check=True)
    *findings, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["ValueError", "TooSlow", "MemoryError"] == [finding["error"] for finding in findings]
    assert {"ValueError": 1, "TooSlow": 1, "MemoryError": 1} == summary["errors"]
    assert (4, 1) == (summary["cases"], summary["accepted"])


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    assert [] == campaign.from_json(path, seed=1)
    found = Finding("task", 7, "ValueError", "codec.py:1", "00ff")
    results = [campaign.Result(Summary("task", cases=9, foreign=1, errors={"ValueError": 1}), [found])]
    path.write_text(campaign.as_json(results, seed=1))
    assert results == campaign.from_json(path, seed=1)
    with pytest.raises(SystemExit, match="of seed 1, not 2"):
        campaign.from_json(path, seed=2)


def test_parts_come_back_as_they_were_joined() -> None:
    parts = [b"", b"a", b"bc" * 1_000]
    assert parts == frames.split(frames.join(parts))


@pytest.mark.parametrize(
    "case", [json_case, toml_case, message_case(METHODS["Session"].input_type._concrete_class)]
)
def test_any_bytes_can_be_changed(case) -> None:
    for number in range(200):
        assert isinstance(case(Random(number), b"\xff\x00[", ()), bytes)
