"""The server image has no torch, pillow or matplotlib: the command must start a server without them."""

from __future__ import annotations

import subprocess
import sys

import pytest

ABSENT = ("torch", "transformers", "PIL", "matplotlib", "sklearn")


@pytest.mark.parametrize("verb", ["coordinator", "aggregator", "certs"])
def test_servers_start_without_what_only_devices_have(verb: str) -> None:
    program = (
        "import sys; from importlib import import_module\n"
        f"sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        f"import_module('fedel.cli.main').main(['{verb}', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert verb in done.stdout
