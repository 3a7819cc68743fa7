"""The agent as a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
from fedel_edge.__main__ import load, main
from fedel_edge.config import AgentConfig

from tests.agents.stand_ins import PATIENCE_SECONDS, federation, run_table

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_training_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as fed:
            config = tmp_path / "agent.toml"
            config.write_text(
                f'name = "client-1"\ncoordinator = "{fed.coordinator_address}"\n'
                f"state_dir = {json.dumps(str(tmp_path / 'state'))}\n"
                '[code]\nallow = ["tests"]\n'
            )
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fedel_edge", "--config", str(config), "--set", "log_json=false"),
                cwd=REPOSITORY,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                await fed.joined(run_table("held"))
                fed.order(0)
                await fed.coordinator.until("progress", 1, lambda p: bool(p.window.selected))
                process.send_signal(number)
                _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert (0, True) == (process.returncode, fed.coordinator.half_closed), errors.decode()
            assert b"Traceback" not in errors

    asyncio.run(scenario())


def test_example_configuration_has_the_defaults() -> None:
    example = load(str(REPOSITORY / "configs" / "agent.toml"))
    assert AgentConfig() == example


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("slowdown = 2\n[data]\nof = 4\n")
    config = load(str(tmp_path / "a.toml"), ["slowdown=3", "data.index=1"])
    assert (3.0, 1, 4) == (config.slowdown, config.data.index, config.data.of)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("slowdwon=2", "did you mean 'slowdown'?"),
        ("slowdown=0.5", "at least 1"),
        ("data.index=3", "not one of the parts 0 to 0"),
        ("coordinator=somewhere", "host:port"),
        ("threads=-1", "negative"),
    ],
)
def test_wrong_configuration_exits_with_2(override: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["--set", override])
    assert hint in capsys.readouterr().err
