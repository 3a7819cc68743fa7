"""A run on one screen: a live table on a terminal, plain lines without one."""

from __future__ import annotations

import json
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedel.records import RoundRecord
from fedel.report.refusals import NewReasons, count_said, reasons
from fedel.report.words import plural
from fedel.roles.gate import clean
from fedel.v1 import coordinator_pb2 as pb

PHASES = {
    pb.RUN_PHASE_WAITING: "waiting for clients",
    pb.RUN_PHASE_RUNNING: "running",
    pb.RUN_PHASE_PAUSED: "paused",
    pb.RUN_PHASE_FINISHED: "finished",
    pb.RUN_PHASE_STOPPED: "stopped",
    pb.RUN_PHASE_FAILED: "failed",
}
MAX_ROWS = 20
MAX_CELL, NARROW_CELL = 40, 10
"""Letters of a name in the table, on a wide screen and on a narrow one, which shows no device types."""
WIDE = 120
MAX_TROUBLES = 3


def bar(end: int, front: int, num_blocks: int) -> str:
    """The window over the blocks, input on the left.

    >>> bar(2, 4, 6)
    '·███··'
    >>> bar(0, 0, 3)
    '···'
    """
    return "".join("█" if end <= block <= front else "·" for block in range(1, num_blocks + 1))


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes else "-"


def against(seconds: float, budget: float) -> str:
    """Seconds, and how far they are from the budget.

    >>> against(1.1, 1.0)
    '1.10 s (+10 %)'
    """
    if not seconds:
        return "-"
    return f"{seconds:.2f} s ({100 * (seconds / budget - 1):+.0f} %)" if budget else f"{seconds:.2f} s"


def more_than_there_are(num_participants: int, num_clients: int) -> str:
    """A warning if a job asks for more clients per round than the fleet has; empty if it does not."""
    if num_participants <= num_clients:
        return ""
    return (
        f"rounds.num_participants = {num_participants}, but the fleet has {plural(num_clients, 'client')}: "
        "all of them take part in every round"
    )


class Screen:
    """Shows one run; use as a context manager and call ``show`` with every status."""

    def __init__(self, console: Console, num_blocks: int) -> None:
        self._console = console
        self._num_blocks = num_blocks
        self._rounds: list[RoundRecord] = []
        self._message = ""
        self._new_reasons = NewReasons()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, status: pb.RunStatus) -> None:
        new = [RoundRecord.from_json(line) for line in status.rounds_json]
        self._rounds += new
        if self._live:
            self._live.update(self._table(status), refresh=True)
            return
        for record in new:
            self._say(_line(record, status.num_rounds))
            for trouble in self._new_reasons.of(record):
                self._say(f"  {trouble}")
        if status.message != self._message:
            self._message = status.message
            if status.message:
                self._say(f"{PHASES.get(status.phase, '')}: {status.message}")

    def print(self, status: pb.RunStatus) -> None:
        """The table once, also where there is no terminal."""
        self._rounds += [RoundRecord.from_json(line) for line in status.rounds_json[-1:]]
        self._console.print(self._table(status))

    def _say(self, line: str) -> None:
        """One line, however long: a script reads it."""
        self._console.print(Text(clean(line)), soft_wrap=True)

    def _table(self, status: pb.RunStatus) -> Group:
        done = self._rounds[-1] if self._rounds else None
        strategy = json.loads(status.config_json).get("strategy", {}).get("name", "")
        head = Text.assemble(
            (clean(status.run), "bold"),
            f"  {strategy}  round {min(status.round_num + 1, status.num_rounds)} of {status.num_rounds}"
            f"  {PHASES.get(status.phase, '')}, {status.round_phase}"
            f"  T_th {1000 * status.budget_seconds:.1f} ms per step",
        )
        if status.message:
            head.append(f"\n{clean(status.message)}", style="yellow")
        table = Table(box=None, pad_edge=False)
        wide = self._console.width >= WIDE
        most = MAX_CELL if wide else NARROW_CELL
        for column in ("client", *["device"] * wide, "phase", "window", "time (T_th)", "up", "down"):
            table.add_column(column, no_wrap=True)
        for client in status.clients[:MAX_ROWS]:
            window = client.window
            table.add_row(
                Text(clean(client.client, most)),
                *[Text(clean(client.device_type, most))] * wide,
                Text(clean(client.phase, most) if client.connected else "away"),
                bar(window.end_block, window.front_block, self._num_blocks),
                against(client.counted_seconds, client.budget_seconds),
                megabytes(client.bytes_up),
                megabytes(client.bytes_down),
                style=None if client.connected else "dim",
            )
        foot = Text(_line(done, status.num_rounds) if done else "no round is closed yet", style="dim")
        for trouble in troubles(done) if done else ():
            foot.append(f"\n{clean(trouble)}")
        if len(status.clients) > MAX_ROWS:
            foot.append(f"\nand {len(status.clients) - MAX_ROWS} more clients")
        return Group(head, table, foot)


def troubles(record: RoundRecord) -> list[str]:
    """What went wrong in a round, for people: why updates did not count, the most frequent reasons first."""
    found = [reason.sentence for reason in reasons([record])]
    more = [f"and {len(found) - MAX_TROUBLES} more reasons"] if len(found) > MAX_TROUBLES else []
    return ([record.trouble] if record.trouble else []) + found[:MAX_TROUBLES] + more


def _own(record: RoundRecord) -> str:
    """What the model is worth on clients' own data, where they tested it."""
    if record.client_tests is None:
        return ""
    spread = record.client_tests.overall
    return f" (clients {100 * spread.mean_accuracy:.1f} %, worst {100 * spread.worst_accuracy:.1f} %)"


def _line(record: RoundRecord, num_rounds: int) -> str:
    accuracy = record.accuracy
    worst = max(record.deviations(), key=abs, default=None)
    return (
        f"round {record.round + 1:>3}/{num_rounds}  {record.latency_seconds:7.2f} s"
        f"  {count_said(record)}"
        f"  loss {'-' if record.loss is None else f'{record.loss:.3f}'}"
        f"  accuracy {'-' if accuracy is None else f'{100 * accuracy:.1f} %'}{_own(record)}"
        f"  worst against T_th {'-' if worst is None else f'{100 * worst:+.0f} %'}"
        f"  up {record.bytes_up / 1e6:.2f} MB  down {record.bytes_down / 1e6:.2f} MB"
    )
