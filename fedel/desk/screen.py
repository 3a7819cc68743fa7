"""A run on one screen: a live table on a terminal, plain lines without one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedel.records import RoundRecord
from fedel.report.refusals import NewReasons, count_said, reasons
from fedel.report.words import plural
from fedel.roles.gate import MAX_NAME, clean
from fedel.v1 import coordinator_pb2 as pb

PHASES = {
    pb.RUN_PHASE_QUEUED: "queued",
    pb.RUN_PHASE_WAITING: "waiting for clients",
    pb.RUN_PHASE_RUNNING: "running",
    pb.RUN_PHASE_PAUSED: "paused",
    pb.RUN_PHASE_FINISHED: "finished",
    pb.RUN_PHASE_STOPPED: "stopped",
    pb.RUN_PHASE_FAILED: "failed",
}
MAX_ROWS = 20
MAX_CELL = 40
"""Letters of a cell in the table. Names of clients are never cut: they tell the rows apart."""
DROPPED_FIRST = ("up", "down", "device", "window")
"""Columns that a narrow screen does without, in this order."""
FIRST_PROGRESS_SECONDS, MAX_PROGRESS_SECONDS = 30.0, 600.0
"""Without a terminal, an open round is mentioned after this long, then ever more rarely, at least so often."""
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

    def __init__(self, console: Console, num_blocks: int = 1) -> None:
        """``num_blocks`` of the model, if that is known; otherwise the windows tell it."""
        self._console = console
        self._num_blocks = num_blocks
        self._rounds: list[RoundRecord] = []
        self._message = ""
        self._new_reasons = NewReasons()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._open_round, self._next_progress = -1, 0.0

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
        self._say_progress(status)

    def print(self, status: pb.RunStatus) -> None:
        """The table once, also where there is no terminal; there it has all clients."""
        self._rounds += [RoundRecord.from_json(line) for line in status.rounds_json[-1:]]
        self._console.print(self._table(status, MAX_ROWS if self._live else len(status.clients)))

    def _say_progress(self, status: pb.RunStatus) -> None:
        """That a round is open, from time to time: at once for the first that is seen, later for the others."""
        if status.round_phase in ("", "waiting"):
            return
        if status.round_num != self._open_round:
            self._next_progress = 0.0 if self._open_round < 0 else FIRST_PROGRESS_SECONDS
            self._open_round = status.round_num
        if status.round_seconds < self._next_progress:
            return
        wait = max(FIRST_PROGRESS_SECONDS, min(MAX_PROGRESS_SECONDS, status.round_seconds))
        self._next_progress = status.round_seconds + wait
        self._say(_open_line(status))

    def _say(self, line: str) -> None:
        """One line, however long: a script reads it."""
        self._console.print(Text(clean(line)), soft_wrap=True)

    def _table(self, status: pb.RunStatus, max_rows: int = MAX_ROWS) -> Group:
        done = self._rounds[-1] if self._rounds else None
        strategy = json.loads(status.config_json).get("strategy", {}).get("name", "")
        head = Text.assemble(
            (clean(status.run), "bold"),
            f"  {strategy}  round {min(status.round_num + 1, status.num_rounds)} of {status.num_rounds}"
            f"  {phase_of(status)}",
            f"  T_th {1000 * status.budget_seconds:.1f} ms per step" if status.budget_seconds else "",
        )
        if status.message:
            head.append(f"\n{clean(status.message)}", style="yellow")
        table = self._clients(status.clients[:max_rows])
        foot = Text(_line(done, status.num_rounds) if done else "no round is closed yet", style="dim")
        for trouble in troubles(done) if done else ():
            foot.append(f"\n{clean(trouble)}")
        if len(status.clients) > max_rows:
            foot.append(
                f"\nand {len(status.clients) - max_rows} more clients; `fedel status NAME | less` shows all"
            )
        return Group(head, *[table] * bool(status.clients), foot)

    def _clients(self, clients: Sequence[pb.ClientStatus]) -> Table:
        """As many columns as fit; the name of a client takes the lines that it needs."""
        num_blocks = max((self._num_blocks, *(client.window.front_block for client in clients)))
        rows = [self._cells(client, num_blocks) for client in clients]
        columns = rows[0] if rows else {}
        widths = {
            name: max(cell_len(text) for text in (name, *(row[name] for row in rows))) for name in columns
        }
        for name in DROPPED_FIRST:
            if sum(width + 2 for width in widths.values()) - 2 > self._console.width:
                del widths[name]
        table = Table(box=None, pad_edge=False, show_header=bool(rows))
        for name in widths:
            table.add_column(name, no_wrap=name != "client", overflow="fold")
        for client, row in zip(clients, rows, strict=True):
            style = None if client.connected else "dim"
            table.add_row(*(Text(row[name]) for name in widths), style=style)
        return table

    @staticmethod
    def _cells(client: pb.ClientStatus, num_blocks: int) -> dict[str, str]:
        window = client.window
        return {
            "client": clean(client.client, MAX_NAME),
            "device": clean(client.device_type, MAX_CELL),
            "phase": clean(client.phase, MAX_CELL) if client.connected else "away",
            "window": bar(window.end_block, window.front_block, num_blocks),
            "time (T_th)": against(client.counted_seconds, client.budget_seconds),
            "up": megabytes(client.bytes_up),
            "down": megabytes(client.bytes_down),
        }


def phase_of(status: pb.RunStatus) -> str:
    """The phase of a run, and that of its round if one is open.

    >>> phase_of(pb.RunStatus(phase=pb.RUN_PHASE_QUEUED, round_phase="waiting"))
    'queued'
    >>> phase_of(pb.RunStatus(phase=pb.RUN_PHASE_RUNNING, round_phase="train"))
    'running, train'
    """
    phase = PHASES.get(status.phase, "")
    return phase if status.round_phase in ("", "waiting") else f"{phase}, {status.round_phase}"


def _open_line(status: pb.RunStatus) -> str:
    at_work = [client for client in status.clients if client.phase not in ("", "idle")]
    done = sum(client.phase == "done" for client in at_work)
    told = f"{done} of {len(at_work)} clients are done" if at_work else "its clients have not begun"
    return (
        f"round {status.round_num + 1:>3}/{status.num_rounds}  open for {status.round_seconds:.0f} s"
        f" ({status.round_phase}): {told}"
    )


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
