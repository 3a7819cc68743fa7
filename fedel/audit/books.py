"""What the coordinator wrote about a run: the rows of its database, and the files of the run's directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
from fedel_coordinator.job_code import code_of
from fedel_coordinator.persistence import plan_from_json, spec_from_json
from fedel_coordinator.run import from_config
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import RoundRow, RunRow, Store

from fedel.audit.findings import DAMAGED, DIFFERS, ILLEGAL, MISSING, TWICE, Findings
from fedel.job import RunConfig
from fedel.job_code import JobCode
from fedel.records import RoundRecord
from fedel.roles.planner import Handover
from fedel.roles.run_state import CLOSED, COMMITTED, ENDED, MAX_COMMITTED
from fedel.serialisation import from_json
from fedel.types import ModelSpec, Plan, TimingProfile


@dataclass
class Books:
    """What could be read. Without a database only ``records`` is filled, from ``rounds.jsonl``."""

    where: str
    """The database, or the file."""
    row: RunRow | None = None
    config: RunConfig | None = None
    spec: ModelSpec | None = None
    handover: Handover | None = None
    plans: dict[int, Plan] = field(default_factory=dict)
    records: dict[int, RoundRecord] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    """The records of closed rounds as they were written."""
    profiles: Mapping[str, TimingProfile] = field(default_factory=dict)
    """By client, as of its last join."""
    code: JobCode | None = None
    """What came with the job."""

    @property
    def ended(self) -> bool:
        return self.row is not None and self.row.phase in ENDED

    def at(self, round_num: int) -> str:
        """Where the record of a round is."""
        return f"{self.where}, round {round_num}"


def read_database(url: str, run: str, findings: Findings) -> Books:
    """The database is only read."""
    parsed = sa.make_url(url)
    books = Books(parsed.render_as_string(hide_password=True))
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        findings.add(MISSING, books.where, "there is no such database")
        return books
    with findings.reading(books.where, "the database cannot be read"):
        store = SqlStore(url)
        try:
            _read_run(store, run, books, findings)
        finally:
            store.close()
    return books


def _read_run(store: Store, run: str, books: Books, findings: Findings) -> None:
    row = books.row = store.run(run)
    if row is None:
        findings.add(MISSING, books.where, f"it has no run '{run}'")
        return
    with findings.reading(f"{books.where}, table runs", f"the row of run '{run}' cannot be read"):
        books.config = RunConfig.parse(from_config(row), f"run '{run}'")
        books.spec = spec_from_json(row.spec_json)
        books.handover = from_json(Handover, row.state_json, "state_json")
    with findings.reading(f"{books.where}, table codes", "the job's code cannot be read"):
        books.code = code_of(store, f"audit of {run}", row.config_json)
    profiles = {}
    for client in store.clients(run):
        with findings.reading(f"{books.where}, client '{client.client}'", "its row cannot be read"):
            profiles[client.client] = from_json(TimingProfile, client.profile_json, "profile_json")
    books.profiles = profiles
    last = store.last_round(run)
    if last is None:
        return
    for round_num in range(last.round_num + 1):
        entry = store.round(run, round_num)
        if entry is None:
            findings.add(MISSING, books.at(round_num), "there is no row of this round")
        else:
            _read_round(entry, last, books, findings)


def _may_be_unclosed(row: RoundRow, last: RoundRow) -> bool:
    """The last round; and the one before it while its model is tested."""
    if row.round_num == last.round_num:
        return True
    is_in_test = row.status == COMMITTED and row.round_num > last.round_num - MAX_COMMITTED
    return is_in_test and last.status != CLOSED


def _read_round(row: RoundRow, last: RoundRow, books: Books, findings: Findings) -> None:
    where = books.at(row.round_num)
    with findings.reading(where, "the plan of this round cannot be read"):
        books.plans[row.round_num] = plan_from_json(row.plan_json, {})
    if row.status != CLOSED:
        if not _may_be_unclosed(row, last):
            findings.add(ILLEGAL, where, f"the round is {row.status}, although later ones were planned")
        if row.record_json == "{}":
            return
    with findings.reading(where, "the record of this round cannot be read"):
        books.records[row.round_num] = RoundRecord.from_json(row.record_json, where)
        if row.status == CLOSED:
            books.texts.append(row.record_json)


def read_directory(path: Path, books: Books | None, findings: Findings) -> Books:
    """``rounds.jsonl``, held against the database if there is one."""
    file = path / "rounds.jsonl"
    lines: list[str] = []
    with findings.reading(file, "the records of the rounds cannot be read"):
        lines = file.read_text(encoding="utf-8").splitlines()
    if books is None:
        books = Books(str(file))
        for number, line in enumerate(lines):
            with findings.reading(file, f"line {number + 1} is not a record"):
                books.records[number] = RoundRecord.from_json(line)
        return books
    for number, (line, text) in enumerate(zip(lines, books.texts, strict=False)):
        if line != text:
            findings.add(
                DIFFERS, file, f"line {number + 1} is not the record of round {number} in {books.where}"
            )
            return books
    if len(lines) != len(books.texts):
        many = f"it has {len(lines)} lines, for {len(books.texts)} closed rounds"
        findings.add(MISSING if len(lines) < len(books.texts) else DIFFERS, file, many)
    return books


def check_records(books: Books, findings: Findings) -> None:
    """Each record in itself, and against the plan that it is the record of."""
    for round_num, record in sorted(books.records.items()):
        where = books.at(round_num)
        names = [entry.client for entry in record.clients]
        if record.round != round_num:
            findings.add(DIFFERS, where, f"it holds the record of round {record.round}")
        if record.version != round_num + 1:
            findings.add(ILLEGAL, where, f"its version is {record.version}, not {round_num + 1}")
        if record.num_updates != len(names):
            findings.add(DIFFERS, where, f"{record.num_updates} updates of {len(names)} clients")
        for name in sorted({name for name in names if names.count(name) > 1}):
            findings.add(TWICE, where, f"client '{name}' counts twice")
        _check_planned(books, round_num, record, findings)
    _check_handover(books, findings)


def _check_planned(books: Books, round_num: int, record: RoundRecord, findings: Findings) -> None:
    if books.config is None or round_num not in books.plans:
        return
    where, plan = books.at(round_num), books.plans[round_num]
    planned = {task.client for task in plan.tasks}
    if record.num_tasks != len(plan.tasks):
        findings.add(DIFFERS, where, f"{record.num_tasks} tasks in the record, {len(plan.tasks)} in the plan")
    for late in range(1, books.config.rounds.staleness.max_rounds + 1):
        if round_num - late in books.plans:
            planned |= {task.client for task in books.plans[round_num - late].tasks}
    for entry in record.clients:
        if entry.client not in planned:
            findings.add(ILLEGAL, where, f"client '{entry.client}' counts without a task")


def _check_handover(books: Books, findings: Findings) -> None:
    """What the next round would start from is what the last record says."""
    row, handover, records = books.row, books.handover, books.records
    if row is None or handover is None or not records:
        return
    where, last = f"{books.where}, table runs", max(records)
    if not row.model_version == handover.round_num == last + 1:
        findings.add(
            DIFFERS,
            where,
            f"model_version {row.model_version}, state of round {handover.round_num}, last record of {last}",
        )
    counted = {entry.client: entry for _, record in sorted(records.items()) for entry in record.clients}
    if handover.reports.keys() != counted.keys():
        names = sorted(handover.reports.keys() ^ counted.keys())
        findings.add(DIFFERS, where, f"the state and the records name different clients: {', '.join(names)}")
    for client in sorted(handover.reports.keys() & counted.keys()):
        report, entry = handover.reports[client], counted[client]
        window = (report.window.end, report.window.front) if report.window else None
        if (window, report.selected, report.resets) != (entry.window, entry.selected, entry.resets):
            what = f"the state of client '{client}' is not that of the last round it counted in"
            findings.add(DIFFERS, where, what)


def unknown_rounds(books: Books, findings: Findings) -> None:
    """An ended run has a record of every round up to its newest version."""
    if books.row is not None and books.ended:
        for round_num in range(books.row.model_version):
            if round_num not in books.records:
                findings.add(DAMAGED, books.at(round_num), "the run has ended without a record of this round")
