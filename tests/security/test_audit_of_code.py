"""An audit of a run whose method came with its job: found at the servers, and run only if a person says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedel.api.code import signed
from fedel.audit.audit import Audit, Sources, audit
from fedel.cli.main import main
from fedel.desk.submit import follow
from fedel.errors import ConfigError
from fedel.v1 import coordinator_pb2 as pb
from tests.security.support import Pki, servers
from tests.security.test_job_code import ADA, agents, job_with, own, start
from tests.services.coordinator.support import asynchronous

RUN = "night"


async def play(folder: Path, strategy: str) -> None:
    pki = Pki(folder)
    operator = pki.tls("operator", "ada")
    job = job_with(own(), strategy)
    settings = {"aggregator_code": ADA, "code": ADA, "keep_updates": -1}
    async with servers(folder, pki, **settings) as made, agents(made, folder, ADA, ADA):
        await start(made, operator, RUN, job, signed(own(), job, operator))
        last = await follow(made.coordinator_address, RUN, lambda _: None, operator)
    assert pb.RUN_PHASE_FINISHED == last.phase, last.message


def places(folder: Path, which: str = "both") -> dict[str, object]:
    found: dict[str, object] = {}
    if which != "database":
        found["aggregators"] = (folder / "aggregator",)
    if which != "aggregator":
        found["database_url"] = f"sqlite:///{folder / 'coordinator.db'}"
    return found


@asynchronous
async def test_the_method_is_found_at_the_servers(tmp_path: Path) -> None:
    await play(tmp_path, "method:Mine")
    for which in ("both", "aggregator", "database"):
        where = places(tmp_path, which)
        with pytest.raises(ConfigError, match=r"as code [0-9a-f]{12} of operator:ada: .* say --run-code"):
            audit(Sources(RUN, **where))  # type: ignore[arg-type]
        found: Audit = audit(Sources(RUN, **where, run_code=True))  # type: ignore[arg-type]
        assert ((), int(which != "database")) == (found.findings, found.num_recomputed)
    (kept,) = (tmp_path / "aggregator" / "code").iterdir()
    kept.unlink()
    lost = audit(Sources(RUN, **places(tmp_path, "aggregator"), run_code=True))  # type: ignore[arg-type]
    assert ("missing", str(kept)) == (lost.findings[0].kind, lost.findings[0].where)


@asynchronous
async def test_code_for_devices_does_not_have_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model and the trainer came with the job, the method is FedEL's own."""
    await play(tmp_path, "fedavg")
    words = ["--aggregator", str(tmp_path / "aggregator"), "--database", str(places(tmp_path)["database_url"])]
    assert 0 == main(["audit", RUN, *words])
    assert "sound" in capsys.readouterr().out
