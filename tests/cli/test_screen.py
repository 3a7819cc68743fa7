"""What an operator reads: whatever agents call themselves, with and without a terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from fedel.cli.runs import _show
from fedel.desk.screen import Screen, more_than_there_are
from fedel.records import RoundRecord
from fedel.roles.gate import clean
from fedel.v1 import coordinator_pb2 as pb

EVIL = "[/red]\x1b]0;PWNED\x07\x1b[2J[link=http://evil]x"
RECORD = RoundRecord(
    round=0,
    strategy="fedel",
    budget_seconds=0.1,
    num_tasks=2,
    num_updates=1,
    loss=0.5,
    o1=0.0,
    clients=(),
    refused={"a": "loss is nan: training diverged, try a lower learning rate"},
)


def status_of(**fields: object) -> pb.RunStatus:
    config = json.dumps({"strategy": {"name": "fedel"}})
    status = pb.RunStatus(run="night", config_json=config, num_rounds=3, phase=pb.RUN_PHASE_RUNNING, **fields)
    for number in range(2):
        status.clients.add(
            client=f"{number}{EVIL}",
            device_type=EVIL,
            connected=True,
            phase="download",
            train_seconds=12.34,
            budget_seconds=10.0,
            bytes_up=123_456_789,
            bytes_down=123_456_789,
        )
    return status


def printed(width: int, terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=terminal), out


def test_names_of_agents_are_shown_as_text() -> None:
    for width in (80, 200):
        console, out = printed(width)
        Screen(console, 16).print(status_of(message=EVIL))
        assert "[/red]" in out.getvalue()
        assert "\x1b" not in out.getvalue()
        assert "\x07" not in out.getvalue()


def test_the_table_fits_into_80_columns_and_cuts_no_name() -> None:
    console, out = printed(80)
    Screen(console, 16).print(status_of())
    lines = out.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert 2 == sum(clean(EVIL) in line and "download" in line for line in lines), "bytes are left out"
    console, out = printed(200)
    Screen(console, 16).print(status_of())
    assert 2 == out.getvalue().count("123.5 MB  123.5 MB")


def test_a_name_longer_than_the_screen_takes_several_lines() -> None:
    status, (console, out) = status_of(), printed(80)
    status.clients[0].client = "x" * 199 + "!"
    Screen(console, 16).print(status)
    assert 199 == out.getvalue().count("x") - out.getvalue().count("http://evil]x")
    assert "!" in out.getvalue()


def test_a_pipe_gets_every_client_a_terminal_the_first() -> None:
    status = status_of()
    for number in range(30):
        status.clients.add(client=f"more-{number}", connected=True)
    console, out = printed(80)
    Screen(console).print(status)
    assert 30 == out.getvalue().count("more-")
    console, out = printed(80, terminal=True)
    Screen(console).print(status)
    assert 18 == out.getvalue().count("more-")
    assert "and 12 more clients" in out.getvalue()


def test_a_run_that_waits_for_its_turn_says_so() -> None:
    console, out = printed(80)
    status = status_of(message="waits in the queue behind night (running)")
    status.phase, status.round_phase = pb.RUN_PHASE_QUEUED, "waiting"
    Screen(console).print(status)
    head = out.getvalue().splitlines()
    assert ["night  fedel  round 1 of 3  queued", "waits in the queue behind night (running)"] == head[:2]


def test_without_a_terminal_an_open_round_is_mentioned_from_time_to_time() -> None:
    console, out = printed(80)
    with Screen(console, 6) as screen:
        for number, seconds in ((0, 0.1), (0, 20.0), (0, 31.0), (0, 59.0), (0, 63.0), (1, 5.0), (1, 30.0)):
            status = status_of(round_num=number, round_phase="train", round_seconds=seconds)
            status.clients[0].phase = "done"
            screen.show(status)
    assert [
        "round   1/3  open for 0 s (train): 1 of 2 clients are done",
        "round   1/3  open for 31 s (train): 1 of 2 clients are done",
        "round   1/3  open for 63 s (train): 1 of 2 clients are done",
        "round   2/3  open for 30 s (train): 1 of 2 clients are done",
    ] == out.getvalue().splitlines()


def test_a_pipe_gets_rounds_reasons_and_messages() -> None:
    console, out = printed(80)
    with Screen(console, 6) as screen:
        first = status_of(message="1 of 2 reports at the deadline; waits for more")
        screen.show(first)
        screen.show(first)
        screen.show(status_of(rounds_json=[RECORD.to_json()]))
    lines = out.getvalue().splitlines()
    assert "running: 1 of 2 reports at the deadline; waits for more" == lines[0]
    assert lines[1].startswith("round   1/3")
    assert "  1 update did not count (a): loss is nan: training diverged, try a lower learning rate" == lines[2]
    assert 3 == len(lines)


def test_a_reason_is_said_once_and_every_round_counts_its_updates() -> None:
    console, out = printed(80)
    other = "loss is inf: training diverged, try a lower learning rate"
    rounds = [
        replace(RECORD, num_updates=0, refused={"a": RECORD.refused["a"], "b": other}),
        replace(RECORD, round=1, refused={"c": other}),
        replace(RECORD, round=2, refused={"a": "it was silent"}, loss=None),
    ]
    with Screen(console, 6) as screen:
        for record in rounds:
            screen.show(status_of(rounds_json=[record.to_json()]))
    lines = out.getvalue().splitlines()
    assert "0/2 updates (2 did not count)" in lines[0]
    assert (
        "  2 updates did not count (a, b): loss is nan: training diverged, try a lower learning rate"
        == lines[1]
    )
    assert "1/2 updates (1 did not count)" in lines[2]
    assert lines[3].startswith("round   3/3")
    assert "loss -" in lines[3]
    assert "  1 update did not count (a): it was silent" == lines[4]


def test_more_participants_than_clients_are_mentioned() -> None:
    assert "num_participants = 30, but the fleet has 1 client:" in more_than_there_are(30, 1)
    assert not more_than_there_are(8, 8)


def test_the_list_of_runs_shows_no_markup(capsys) -> None:
    _show([{"run": "night", "message": EVIL}], as_json=False)
    shown = capsys.readouterr().out
    assert "[/red]" in shown
    assert "\x1b" not in shown
