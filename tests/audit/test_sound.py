"""Runs without damage: nothing is found, and all is computed again that can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as serve_aggregator
from fedel_coordinator.store import RoundRow

from fedel.audit import books
from fedel.audit.audit import Sources, audit
from fedel.cli.main import main
from fedel.errors import ServiceError
from fedel.job import Protection, Server
from fedel.v1.aggregator_pb2 import ModelHeader
from tests.audit.runs import NUM_CLIENTS, NUM_ROUNDS, RUN, play

METHODS = [
    {"name": "fedel"},
    {"name": "fedel", "variant": "no-rollback", "hold_rounds": 2},
    {"name": "fedel", "variant": "disjoint", "budget_scope": "train"},
    {"name": "fedel", "window_within": True, "start": "spread"},
    {"name": "fednova", "base": {"name": "fedel"}},
    {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": NUM_CLIENTS},
    {"name": "heterofl"},
    {"name": "timelyfl"},
]


@pytest.mark.parametrize("strategy", METHODS, ids=lambda s: "-".join(map(str, s.values())).split("{")[0])
def test_every_version_is_computed_again(tmp_path: Path, strategy: dict[str, object]) -> None:
    found = audit(play(tmp_path, strategy))
    assert () == found.findings
    assert (NUM_ROUNDS, NUM_ROUNDS) == (found.num_rounds, found.num_recomputed)
    assert 2 * NUM_ROUNDS * NUM_CLIENTS == found.num_updates


def test_the_steps_of_the_server_are_computed_again(tmp_path: Path) -> None:
    where = play(tmp_path, {"name": "fedel", "damping": 0.5}, server=Server(average=0.75, momentum=0.3))
    found = audit(where)
    assert ((), NUM_ROUNDS) == (found.findings, found.num_recomputed)
    header = where.aggregators[0] / "runs" / RUN / "run.pb"
    kept = ModelHeader.FromString(header.read_bytes())
    kept.server_json = json.dumps({"average": 0.7, "momentum": 0.3})
    header.write_bytes(kept.SerializeToString())
    whats = [finding.what for finding in audit(where).findings]
    assert any("own tensors of version" in what for what in whats), whats


def test_masked_updates(tmp_path: Path) -> None:
    where = play(tmp_path, {"name": "fedavg"}, protection=Protection(secure=True))
    found = audit(where)
    assert ((), NUM_ROUNDS) == (found.findings, found.num_recomputed)
    (kept,) = where.aggregators[0].rglob("updates/000002/unmask.pb")
    kept.unlink()
    assert any("the updates of round 2 cannot be folded" in finding.what for finding in audit(where).findings)


def test_late_updates_are_legal(tmp_path: Path) -> None:
    found = audit(play(tmp_path, {"name": "fedel"}, num_aggregators=1, late="next"))
    assert ((), NUM_ROUNDS) == (found.findings, found.num_recomputed)


@pytest.mark.parametrize(("keep", "recomputed"), [(0, 0), (2, 2), (4, 6)])
def test_says_how_much_could_be_computed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keep: int, recomputed: int
) -> None:
    where = play(tmp_path, {"name": "fedel"}, num_aggregators=1, keep_updates=keep)
    assert recomputed == audit(where).num_recomputed
    words = ["--aggregator", *map(str, where.aggregators), "--database", where.database_url]
    assert 0 == main(["audit", RUN, *words, "--runs-dir", str(tmp_path / "runs")])
    said = capsys.readouterr().out
    assert f"{recomputed} of {NUM_ROUNDS} versions computed again" in said
    assert ("keep_updates in aggregator.toml" in said) == (keep == 0)


def test_needs_something_to_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["audit", RUN])
    assert "name --aggregator" in capsys.readouterr().err
    assert 7 == main(["audit", RUN, "--aggregator", str(tmp_path / "nowhere")])
    assert "there is no such folder" in capsys.readouterr().err


async def _audit_while_it_runs(folder: Path) -> None:
    async with serve_aggregator(AggregatorConfig(listen="127.0.0.1:0", data_dir=folder)):
        audit(Sources(RUN, (folder,)))


def test_refuses_a_folder_in_use(tmp_path: Path) -> None:
    import asyncio

    with pytest.raises(ServiceError, match="stop it first"):
        asyncio.run(_audit_while_it_runs(tmp_path))


@pytest.mark.parametrize(
    ("status", "last", "legal"),
    [
        ("committed", "open", True),
        ("committed", "committed", True),
        ("committed", "closed", False),
        ("sealed", "open", False),
    ],
)
def test_a_round_may_be_in_test_while_the_next_is_open(status: str, last: str, legal: bool) -> None:
    rounds = [RoundRow(RUN, number, each, "{}", 0.0) for number, each in ((3, status), (4, status), (5, last))]
    assert [False, legal, True] == [books._may_be_unclosed(row, rounds[-1]) for row in rounds]
