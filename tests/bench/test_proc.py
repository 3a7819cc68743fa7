"""What is read from /proc about a real process, its children, and one that has ended."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from fedel.bench import machine, proc

CHILD = "import sys; print('up', flush=True); sys.stdin.read()"
BUSY = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE)
data = bytearray(50_000_000)
begin = time.process_time()
while time.process_time() - begin < 0.3:
    pass
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def busy():
    """A process that used 0.3 s and 50 MB, and has a child."""
    words = [sys.executable, "-c", BUSY]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        lines = {process.stdout.readline().split()[0] for _ in range(2)}
        assert {"up", "done"} == lines
        yield process
        process.stdin.close()


def test_reads_cpu_and_memory_of_a_process(busy):
    assert 0.3 <= proc.cpu_seconds([busy.pid]) < 10
    assert 50_000_000 < proc.peak_bytes([busy.pid]) < 1_000_000_000


def test_finds_children_unless_they_are_left_out(busy):
    family = proc.family([busy.pid])
    assert [busy.pid] == family[:1]
    assert 2 == len(family)
    assert "sys.stdin.read()" in proc.command(family[1])
    assert [busy.pid] == proc.family([busy.pid], without="print('up'")


def test_a_process_that_ended_has_nothing(busy):
    busy.stdin.close()
    busy.wait()
    assert [] == proc.family([busy.pid])
    assert 0 == proc.cpu_seconds([busy.pid])
    assert 0 == proc.peak_bytes([busy.pid])


def test_a_watch_marks_rounds_and_sees_peaks(busy):
    with proc.Watch((busy.pid,), (busy.pid,)) as watch:
        watch.mark()
        watch.mark()
    first, second = watch.marks
    assert first.seconds <= second.seconds <= time.monotonic()
    assert first.cpu_seconds >= 0.3
    assert watch.server_peak >= watch.client_peak > 50_000_000


def test_knows_the_machine():
    about = machine.describe()
    assert about["cores"] >= 1
    assert about["model"]
    assert 0 < machine.available_bytes() <= about["memory_bytes"]
    assert proc.loopback_bytes() >= 0
