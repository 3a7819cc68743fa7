"""A module as a process that ends when its parent does: ``python -m cli.child PARENT SIGNAL MODULE WORD...``.

A child that sets this up for itself can be started without ``preexec_fn``, which forks Python beside gRPC's
threads and now and then crashes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys


def command(module: str, *arguments: str, at_the_end: signal.Signals = signal.SIGTERM) -> list[str]:
    """How to start a module so that it gets a signal when this process is gone, even if that was killed."""
    return [sys.executable, "-m", "fedel.cli.child", str(os.getpid()), str(int(at_the_end)), module, *arguments]


def main() -> None:
    parent, number, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(1, number)
        if os.getppid() != parent:
            sys.exit(f"{module}: the process that started it is gone")
    sys.argv = sys.argv[3:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
