"""A module of ours as a process that ends when its parent ends.

The child asks the kernel for that by itself. ``preexec_fn`` would fork Python beside the threads of gRPC, which
crashes now and then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

START = "import sys; sys.path[:] = filter(None, sys.path); from fedel.desk.child import main; main()"
"""Removes the working directory, which ``-m`` and ``-c`` put first, before anything else is imported.

A package or file of the user's must not take the place of one that we or our dependencies import. (``-P``
does the same, but only from Python 3.11 on.)
"""


def command(
    module: str,
    *arguments: str,
    at_the_end: signal.Signals = signal.SIGTERM,
    user_code: Sequence[str] = (),
) -> list[str]:
    """How to start a module so that it gets a signal when this process ends, even if this process is killed.

    The child searches its working directory, then ``user_code``, after everything that is installed.
    """
    words = (str(os.getpid()), str(int(at_the_end)), os.pathsep.join(user_code), module)
    return [sys.executable, "-c", START, *words, *arguments]


def main() -> None:
    parent, number, folders, module = sys.argv[1:5]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(1, int(number))
        if os.getppid() != int(parent):
            sys.exit(f"{module}: the process that started it has ended")
    for folder in (str(Path.cwd()), *folders.split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.append(folder)
    sys.argv = sys.argv[4:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
