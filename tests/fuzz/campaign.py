"""Many cases of many targets: start the processes that run them, collect what they find, keep what failed."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz.batch import Finding, Summary
from tests.fuzz.rpc import RPCS
from tests.fuzz.target import CORPUS, memory_disk

MOST_PER_PROCESS = 20_000
"""A process that grows is noticed in its memory; one that lives for ever would hide slow growth of others."""
MOST_KEPT_BYTES = 8_192
MOST_KEPT = 20
"""Files of a target in the corpus; more of them would not say more."""
SILENT_SECONDS = 120.0
"""A case that takes this long is ended from outside, with its process."""


@dataclass
class Result:
    """All cases of one target."""

    summary: Summary
    findings: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.summary.foreign and not self.summary.slow


def cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_target(name: str, cases: int, seed: int) -> Result:
    """Run the cases in processes of at most ``MOST_PER_PROCESS`` each; one that dies costs one case."""
    result, first = Result(Summary(name)), 0
    while first < cases:
        last = min(cases, first + MOST_PER_PROCESS)
        with tempfile.NamedTemporaryFile() as progress:
            progress.write(bytes(16))
            progress.flush()
            ended = False
            for record in _records([name], seed, first, last, Path(progress.name)):
                if isinstance(record, Finding):
                    result.findings.append(record)
                else:
                    _add(result.summary, record)
                    ended = True
            if not ended:
                last = _died(result, name, Path(progress.name), first)
        first = last
    return result


def run_rpc(name: str, cases: int, seed: int) -> Result:
    """Real servers and hostile callers, or a real agent and hostile servers."""
    result = Result(Summary(name))
    module = "tests.fuzz.rpc" if name in RPCS else "tests.fuzz.hostile_servers"
    for record in _spoken([sys.executable, "-m", module, name, str(seed), str(cases)], cases, [name]):
        if isinstance(record, Finding):
            result.findings.append(record)
        else:
            result.summary = record
    if not result.summary.cases:
        result.summary.foreign = 1
        result.findings.append(Finding(name, -1, "Died", "no answer in time", ""))
    return result


def run_atheris(runs: int, seed: int) -> Result | None:
    """The codec under atheris; ``None`` where that is not installed."""
    if find_spec("atheris") is None:
        return None
    command = [sys.executable, "-m", "tests.fuzz.coverage_guided", str(runs), str(seed)]
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory_disk()) as folder:
        environment = os.environ | {"TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    result = Result(Summary("codec_atheris", cases=runs))
    if done.returncode:
        result.summary.foreign = 1
        result.findings.append(Finding("codec_atheris", -1, "Crash", done.stderr[-2_000:], ""))
    return result


def _died(result: Result, name: str, progress: Path, first: int) -> int:
    """The process was killed in the middle of a case: that is a finding too. Returns the case to go on with."""
    number = int.from_bytes(progress.read_bytes()[:8], "little", signed=True)
    result.findings.append(Finding(name, number, "Died", "-", ""))
    result.summary.cases += max(0, number - first + 1)
    result.summary.foreign += 1
    result.summary.errors["Died"] = result.summary.errors.get("Died", 0) + 1
    return max(first, number) + 1


def _records(
    names: Sequence[str], seed: int, first: int, last: int, progress: Path
) -> Iterator[Finding | Summary]:
    """What a process says, until it ends."""
    command = [sys.executable, "-m", "tests.fuzz.batch", ",".join(names), str(seed), str(first), str(last)]
    return _spoken([*command, str(progress)], (last - first) * len(names), names)


def _spoken(command: Sequence[str], cases: int, names: Sequence[str]) -> Iterator[Finding | Summary]:
    patience = SILENT_SECONDS + cases * 1.0
    # A process that dies leaves its files: they go with this folder.
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory_disk()) as folder:
        # No data sets: an agent that is offered a run on one that it has begins with minutes of profiling.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder, "FEDEL_DATA": folder}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=patience, env=environment, check=False
            )
            output, errors = done.stdout, done.stderr
        except subprocess.TimeoutExpired as expired:
            output, errors = (expired.stdout or b"").decode(), ""
    if errors and '"Summary"' not in output:
        raise RuntimeError(f"the fuzzing of {', '.join(names)} itself failed:\n{errors}")
    for line in output.splitlines():
        record = json.loads(line)
        kind = {"Finding": Finding, "Summary": Summary}[record.pop("kind")]
        yield kind(**record)


def run_targets(names: Sequence[str], cases: int, seed: int) -> list[Result]:
    """A few cases of each, all in one process: for tests."""
    results = {name: Result(Summary(name)) for name in names}
    with tempfile.NamedTemporaryFile() as progress:
        progress.write(bytes(16))
        progress.flush()
        for record in _records(names, seed, 0, cases, Path(progress.name)):
            if isinstance(record, Finding):
                results[record.target].findings.append(record)
            else:
                results[record.target].summary = record
    return list(results.values())


def _add(total: Summary, more: Summary) -> None:
    for name in ("cases", "accepted", "refused", "foreign", "slow"):
        setattr(total, name, getattr(total, name) + getattr(more, name))
    if more.slowest_seconds > total.slowest_seconds:
        total.slowest_seconds, total.slowest_case = more.slowest_seconds, more.slowest_case
    total.peak_megabytes = max(total.peak_megabytes, more.peak_megabytes)
    for error, count in more.errors.items():
        total.errors[error] = total.errors.get(error, 0) + count


def keep(findings: Sequence[Finding]) -> list[Path]:
    """Write failing cases into the corpus, which the fast tests replay: not large ones, and not too many."""
    paths = []
    for finding in findings:
        data = bytes.fromhex(finding.data)
        if finding.number < 0 or finding.error == "Died" or len(data) > MOST_KEPT_BYTES:
            continue
        if len(list((CORPUS / finding.target).glob("*"))) >= MOST_KEPT:
            continue
        path = CORPUS / finding.target / hashlib.sha256(data).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        paths.append(path)
    return paths


HEADINGS = ("target", "cases", "refused", "foreign", "slow", "slowest s", "peak MB", "CPU s", "")


def table(results: Sequence[Result]) -> str:
    rows = [HEADINGS]
    for result in results:
        s = result.summary
        note = "" if result.clean else "FAILS"
        rows.append(
            (
                s.target,
                f"{s.cases:,}",
                f"{s.refused:,}",
                f"{s.foreign:,}",
                f"{s.slow:,}",
                f"{s.slowest_seconds:.3f}",
                f"{s.peak_megabytes:.1f}",
                f"{s.cpu_seconds:,.1f}",
                note,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    )


def as_json(results: Sequence[Result], seed: int) -> str:
    record = {"seed": seed, "targets": [asdict(result) for result in results]}
    return json.dumps(record, indent=1) + "\n"


def from_json(path: Path, seed: int) -> list[Result]:
    """What a campaign with this seed has written so far."""
    if not path.exists():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["seed"] != seed:
        raise SystemExit(f"{path} is of seed {record['seed']}, not {seed}: name another file with --json")
    return [
        Result(Summary(**each["summary"]), [Finding(**finding) for finding in each["findings"]])
        for each in record["targets"]
    ]
