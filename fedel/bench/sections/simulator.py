"""What a simulation costs besides training: beside a plain PyTorch loop and Flower's simulation on Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedel.bench.page import table
from fedel.bench.section import Goal, Options, Row, Rows, Say, Section
from fedel.desk import child

HERE = Path(__file__).parents[1]
FLOWER = Path.home() / ".cache/fedel/bench/flwr-simulation-1.41.0"
FLOWER_PACKAGES = ("flwr[simulation]==1.41.0",)
NUM_CLIENTS, IN_ROUND, NUM_STEPS = 100, 25, 20
MAX_OVERHEAD = 0.05
WAYS = ("plain loop", "fedavg", "fedel")
WORDS = {"fedavg": "FedEL, FedAvg", "fedel": "FedEL, its own method", "flower": "Flower 1.41.0 on Ray, FedAvg"}
TICKS = os.sysconf("SC_CLK_TCK")


def measure(options: Options, say: Say) -> Iterator[Row]:
    rounds = 2 if options.quick else 6
    yield from _in_turns(options, rounds, say)
    if options.quick:
        return
    for number in (10, 1000):
        say(f"simulator: memory of {number} virtual clients")
        told = _child("memory", number, options.folder / f"memory-{number}")
        yield {"what": f"memory of {number} clients", "virtual_clients": number} | told
    say("simulator: Flower on Ray")
    yield {"what": "flower"} | flower(rounds, options.seconds)


def _in_turns(options: Options, rounds: int, say: Say) -> Iterator[Row]:
    """Each way in a process of its own, one after the other, again and again; the cheapest turn counts."""
    best: dict[str, Row] = {}
    for turn in range(options.turns):
        for way in WAYS:
            say(f"simulator: {way}, turn {turn + 1}")
            row = _child(way, rounds, options.folder / f"{way}-{turn}")
            if way not in best or row["step_seconds"] < best[way]["step_seconds"]:
                best[way] = row
    for way, row in best.items():
        yield {"what": way} | row


def _child(way: str, number: int, folder: Path) -> Row:
    folder.mkdir()
    words = child.command("fedel.bench.simulated", way, str(number), str(folder))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def flower(rounds: int, seconds: float) -> Row:
    """CPU-seconds of all its processes for a client-step, without what a run of one round takes."""
    try:
        python = _flower_python()
        short, long = (_flower_cpu(python, number, seconds) for number in (1, 1 + rounds))
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {seconds:g} s"}
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or ""
        return {"error": f"{type(error).__name__}: {error} {said[-500:]}"}
    steps = rounds * IN_ROUND * NUM_STEPS
    return {
        "step_seconds": (long["cpu_seconds"] - short["cpu_seconds"]) / steps,
        "peak_bytes": long["peak_bytes"],
    }


def _flower_python() -> Path:
    """Of an environment of its own; torch comes from ours, so that both train with the same one."""
    import torch

    python = FLOWER / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FLOWER)], check=True, capture_output=True, text=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *FLOWER_PACKAGES]
        subprocess.run(install, check=True, capture_output=True, text=True)
    (packages,) = FLOWER.glob("lib/python*/site-packages")
    (packages / "torch-of-fedel.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    return python


def _flower_cpu(python: Path, rounds: int, seconds: float) -> dict[str, float]:
    """Ray's processes are found by a word in their environment: they are nobody's children."""
    mark = f"FEDEL_BENCH={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(HERE)  # for Ray's processes, which import ``plain_training``
    words = [str(python), str(HERE / "flower_simulation.py"), str(NUM_CLIENTS), str(IN_ROUND), str(rounds)]
    used: dict[tuple[int, str], tuple[float, int]] = {}
    deadline = time.monotonic() + seconds
    # Into a file: it writes more than a pipe holds, and would wait until somebody reads it.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
        while process.poll() is None:
            if time.monotonic() > deadline:
                for pid, _ in _marked(mark):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(words, seconds)
            used |= _marked(mark)
            time.sleep(1.0)
        if process.returncode:
            output.seek(0)
            raise subprocess.CalledProcessError(process.returncode, words, stderr=output.read())
    cpu = sum(seconds for seconds, _ in used.values())
    return {"cpu_seconds": cpu, "peak_bytes": sum(size for _, size in used.values())}


def _marked(mark: str) -> Mapping[tuple[int, str], tuple[float, int]]:
    """CPU-seconds and most bytes so far of each process with this word in its environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                size = (folder / "status").read_text().partition("VmHWM:")[2].split()
                key = int(folder.name), words[19]
                found[key] = (int(words[11]) + int(words[12])) / TICKS, 1024 * int(size[0]) if size else 0
        except (OSError, IndexError):
            continue  # it has just ended
    return found


def _by_what(rows: Rows) -> dict[str, Mapping[str, Any]]:
    return {row["what"]: row for row in rows}


def _overhead(rows: Rows) -> float | None:
    found = _by_what(rows)
    if "fedavg" not in found or "plain loop" not in found:
        return None
    return float(found["fedavg"]["step_seconds"] / found["plain loop"]["step_seconds"] - 1)


def show(rows: Rows) -> list[str]:
    found = _by_what(rows)
    plain = found["plain loop"]["step_seconds"] if "plain loop" in found else None
    cells = [
        [
            WORDS.get(what, what),
            f"{1 / row['step_seconds']:.0f}",
            f"{row['step_seconds'] / plain:.2f}" if plain else "",
            f"{row['overhead']:.1%}" if "overhead" in row else "",
        ]
        for what, row in found.items()
        if "step_seconds" in row
    ]
    heads = ["way", "client-steps per CPU second", "CPU of a step, plain loop = 1", "besides steps and probes"]
    lines = [f"{NUM_CLIENTS} clients, {IN_ROUND} in a round, {NUM_STEPS} steps each, a small CNN:", ""]
    lines += table(heads, cells)
    broken = {what: row["error"] for what, row in found.items() if "error" in row}
    lines += ["", *(f"{WORDS.get(what, what)}: {error}" for what, error in broken.items())]
    sizes = [(row["virtual_clients"], row["peak_bytes"]) for row in rows if "virtual_clients" in row]
    lines += ["", *(f"{number} virtual clients: {size / 1e6:.0f} MB at most." for number, size in sizes)]
    return lines


def goals(rows: Rows) -> list[Goal]:
    overhead = _overhead(rows)
    if overhead is None:
        return []
    asked = "a simulation of FedAvg beside a plain loop"
    return [Goal(asked, "at most 5 % more CPU", f"{overhead:.1%}", overhead <= MAX_OVERHEAD)]


def ratios(rows: Rows) -> dict[str, float]:
    overhead = _overhead(rows)
    return {} if overhead is None else {"simulation over plain loop": 1 + overhead}


SECTION = Section("simulator", "The simulator", 70, measure, show, goals=goals, ratios=ratios, quick=True)
