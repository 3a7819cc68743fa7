"""Code that travels with a job, on real servers and agents with certificates: taken, or refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from fedel_coordinator.job_code import StoreShelf
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig
from grpc import aio

from fedel.api.code import signed
from fedel.bundle import MAX_BYTES, Bundle
from fedel.desk.submit import CodeToSend, create, follow, plan_run
from fedel.errors import CertificateError, ServiceError
from fedel.job import RunConfig
from fedel.plugins import Allowed
from fedel.security import signed_code
from fedel.security.certificates import utc_now
from fedel.security.folder import load
from fedel.security.identity import Identity
from fedel.security.signed_keys import Proof
from fedel.security.tls import Tls
from fedel.training.settings import DataPart
from fedel.v1 import code_pb2
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.code_pb2_grpc import CodeServiceStub
from fedel.wire import code as wire
from fedel.wire.channel import connect
from tests.agents.stand_ins import running
from tests.federation.support import job_of, until
from tests.federation.trainers import scale_of, spec_of
from tests.security.support import Pki, Servers, servers
from tests.services.coordinator.support import asynchronous
from tests.strategies.fakes import initial_model

CLIENTS = 2
SEEN: list[tuple[str, int]] = []
"""Which version of the job's code each device ran."""
OWN = """
from helpers import VERSION
from tests.federation.trainers import uneven
from tests.security.test_job_code import SEEN

def trainer(run, settings):
    SEEN.append((f"client-{settings.data.index}", VERSION))
    return uneven(run, settings)
"""
METHOD = """
from dataclasses import dataclass
from fedel.strategies import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    name = "mine"
"""


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def own(version: int = 1, **more: str) -> Bundle:
    return Bundle({"own.py": OWN, "helpers.py": f"VERSION = {version}\n", "method.py": METHOD, **more})


def job_with(bundle: Bundle, strategy: str = "fedavg", clients: int = CLIENTS) -> RunConfig:
    job = job_of({"name": strategy}, clients, num_rounds=1)
    return replace(job, trainer="own:trainer", bundle=bundle.sha256)


async def start(made: Servers, operator: Tls, run: str, job: RunConfig, code: CodeToSend | None) -> None:
    spec = spec_of(scale_of(job))
    await create(made.coordinator_address, run, job, spec, initial_model(spec), operator, code)


async def play(
    made: Servers, operator: Tls, run: str, bundle: Bundle, strategy: str = "fedavg"
) -> pb.RunStatus:
    job = job_with(bundle, strategy)
    await start(made, operator, run, job, signed(bundle, job, operator))
    return await follow(made.coordinator_address, run, lambda _: None, operator)


@asynccontextmanager
async def agents(made: Servers, folder: Path, *allowed: Allowed) -> AsyncIterator[list[Agent]]:
    async with AsyncExitStack() as stack:
        found = []
        for index, code in enumerate(allowed):
            name = f"client-{index}"
            tls = made.pki.tls("agent", name)
            own_tls = Tls(dir=tls.dir)  # a device has no list of its own
            config = AgentConfig(
                made.coordinator_address,
                name,
                folder / name,
                data=DataPart(index, max(CLIENTS, len(allowed))),
                code=code,
                tls=own_tls,
            )
            found.append(Agent(config))
            await stack.enter_async_context(running(found[-1]))
        yield found


ANYBODY = Allowed(bundles=True)
ADA = Allowed(bundles=("operator:ada",))


@asynchronous
async def test_code_is_changed_twice_and_no_device_is_touched(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "ada")
    async with servers(tmp_path, pki) as made, agents(made, tmp_path, ADA, ANYBODY) as found:
        for version in (1, 2, 3):
            last = await play(made, operator, f"run-{version}", own(version))
            assert (pb.RUN_PHASE_FINISHED, 1) == (last.phase, last.model_version), last.message
        expected = [(f"client-{index}", version) for version in (1, 2, 3) for index in range(CLIENTS)]
        assert expected == sorted(SEEN, key=lambda seen: (seen[1], seen[0]))
        assert [3, 3] == [agent.counts["done"] for agent in found], "the same agents did all runs"
        await until(lambda: not any(agent._codes for agent in found), "the code to go with its run")
        left = [path.name for index in range(CLIENTS) for path in (tmp_path / f"client-{index}").glob("run-*")]
        assert [] == left


@asynchronous
async def test_two_runs_with_two_versions_at_the_same_time(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "ada")
    async with servers(tmp_path, pki) as made, agents(made, tmp_path, ADA, ADA):
        both = await asyncio.gather(play(made, operator, "one", own(1)), play(made, operator, "two", own(2)))
    assert [pb.RUN_PHASE_FINISHED] * 2 == [last.phase for last in both]
    assert {("client-0", 1), ("client-0", 2), ("client-1", 1), ("client-1", 2)} == set(SEEN)


@asynchronous
async def test_a_method_runs_on_servers_that_allow_it_and_on_no_others(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "ada")
    job = job_with(own(), "method:Mine")
    code = signed(own(), job, operator)
    words = r'put \[code\] bundles = \["operator:ada"\]'
    for folder, settings in (("strict", {}), ("aggregator", {"aggregator_code": ADA})):
        (tmp_path / folder).mkdir()
        async with servers(tmp_path / folder, pki, **settings) as made:
            with pytest.raises(ServiceError, match=words):
                await start(made, operator, "night", job, code)
    (tmp_path / "both").mkdir()
    async with servers(tmp_path / "both", pki, aggregator_code=ADA, code=ADA) as made:
        await start(made, operator, "night", job, code)
    # After a restart, the servers read it from their disks.
    async with (
        servers(tmp_path / "both", pki, aggregator_code=ADA, code=ADA) as made,
        agents(made, tmp_path / "both", ADA, ADA),
    ):
        last = await follow(made.coordinator_address, "night", lambda _: None, operator)
        assert pb.RUN_PHASE_FINISHED == last.phase, last.message


@asynchronous
async def test_a_server_stores_for_others_what_it_would_not_run(tmp_path: Path) -> None:
    """The model and the trainer are for devices: servers need not allow the code."""
    pki = Pki(tmp_path)
    async with servers(tmp_path, pki) as made, agents(made, tmp_path, ADA, ADA):
        last = await play(made, pki.tls("operator", "ada"), "night", own())
    assert pb.RUN_PHASE_FINISHED == last.phase
    assert not (tmp_path / "aggregator" / "code").exists()


@asynchronous
async def test_a_device_that_does_not_allow_it_says_so_and_stays_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "ada")
    eve = Allowed(("own", "tests"), bundles=("operator:eve",))
    async with servers(tmp_path, pki) as made, agents(made, tmp_path, ADA, eve, Allowed()) as found:
        job = job_with(own(), clients=1)
        await start(made, operator, "night", job, signed(own(), job, operator))
        last = await follow(made.coordinator_address, "night", lambda _: None, operator)
        assert pb.RUN_PHASE_FINISHED == last.phase
        words = 'put [code] bundles = ["operator:ada"] into the configuration there (agent.toml on a device)'
        await until(lambda: caplog.text.count("failed: this machine runs no code that comes with") >= 2, "")
        assert words in caplog.text
        assert [1, 0, 0] == [agent.counts["done"] for agent in found]
        assert {("client-0", 1)} == set(SEEN)


@asynchronous
async def test_a_plan_of_a_job_with_code(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "ada")
    async with servers(tmp_path, pki) as made, agents(made, tmp_path, ADA, Allowed()) as found:
        await until(lambda: made.coordinator.sessions.num_sessions == 2, "the sessions")
        job = job_with(own(), clients=1)
        code = signed(own(), job, operator)
        text = await plan_run(made.coordinator_address, job, spec_of(scale_of(job)), 30.0, operator, code)
        plan = json.loads(text)
        assert ["client-0"] == [client["client"] for client in plan["forecast"]["clients"]]
        assert 'put [code] bundles = ["operator:ada"]' in plan["left_out"][0]["why"]
        await until(lambda: not found[0]._codes, "the code to go with the plan")


async def put(made: Servers, tls: Tls, code: code_pb2.StoredCode) -> str:
    """What the coordinator says about code that it does not take."""
    async with connect(made.coordinator_address, tls) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await wire.push(CodeServiceStub(channel), code)
    return str(caught.value.details())


def forged(tls: Tls, text: bytes) -> Proof:
    """The signature of somebody who says that they are an operator."""
    own_certificate = load(tls.folder)
    facts = replace(own_certificate.facts, identity=Identity("operator", "ada"))
    return signed_code.sign(replace(own_certificate, facts=facts), text)


def bad_codes(pki: Pki, folder: Path) -> dict[str, code_pb2.StoredCode]:
    """Code under the hash of ``own()`` that must be refused, by the words."""
    text, ada = own().text, pki.tls("operator", "ada")
    proofs = {
        "is not signed: no device or server takes it": Proof(),
        "not signed by the certificate that came with it": forged(ada, own(6).text),
        "signed by agent 'jetson', who is no operator": forged(pki.tls("agent", "jetson"), text),
        "signed by viewer 'vic', who is no operator": forged(pki.tls("viewer", "vic"), text),
        "of another federation": forged(Pki(folder / "elsewhere").tls("operator", "ada"), text),
        "certificate of operator 'old' expired": forged(pki.expired("operator", "old"), text),
    }
    found = {words: wire.stored(text, proof) for words, proof in proofs.items()}
    altered = wire.stored(text, forged(ada, text))
    altered.text = own(6).text
    return {**found, "it was altered on the way": altered}


@asynchronous
async def test_the_coordinator_takes_no_code_that_is_not_an_operators(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "bob")
    slip = json.dumps({"../evil.py": ""}, separators=(",", ":")).encode()
    codes = bad_codes(pki, tmp_path)
    codes["'../evil.py' is not a Python file with a plain path"] = wire.stored(slip, forged(operator, slip))
    async with servers(tmp_path, pki) as made:
        for words, code in codes.items():
            assert words in await put(made, operator, code)
            assert StoreShelf(made.coordinator.store).get(code.header.sha256) is None
        not_mine = wire.stored(own().text, forged(operator, own().text))
        assert "may not call PutCode" in await put(made, pki.tls("agent", "jetson"), not_mine)
        with pytest.raises(ServiceError, match=r"the job's code [0-9a-f]{12} is not here: send it first"):
            await start(made, operator, "night", job_with(own()), None)


@asynchronous
async def test_a_device_trusts_no_coordinator_with_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody changed what the coordinator stores: each device finds out by itself."""
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "bob")
    async with servers(tmp_path, pki) as made:
        job = job_with(own(), clients=1)
        await start(made, operator, "night", job, signed(own(), job, operator))
        for number, (words, code) in enumerate(bad_codes(pki, tmp_path).items()):
            StoreShelf(made.coordinator.store).put(code)
            caplog.clear()
            async with agents(made, tmp_path / str(number), ANYBODY):
                await until(lambda words=words: words in caplog.text, words)  # type: ignore[misc]
    assert [] == SEEN


@asynchronous
async def test_a_device_hears_of_a_revocation_with_the_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pki = Pki(tmp_path)
    ada, bob = pki.tls("operator", "ada"), pki.tls("operator", "bob")
    async with servers(tmp_path, pki) as made:
        job = job_with(own(), clients=1)
        await start(made, ada, "night", job, signed(own(), job, ada))
        pki.authority.revoke(Identity("operator", "ada"))
        async with agents(made, tmp_path, ANYBODY):
            words = "signed by operator 'ada', whose certificate is revoked"
            await until(lambda: words in caplog.text, "the device to say so")
        assert "is revoked" in await put(made, bob, signed(own(2), job, ada).stored)
        with pytest.raises(ServiceError, match="is revoked"):
            await start(made, ada, "day", job, signed(own(), job, ada))
    assert [] == SEEN
    assert (tmp_path / "client-0" / "crl.pem").exists(), "the device remembers the list"


@asynchronous
async def test_a_device_that_took_it_goes_on_when_the_certificate_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = Pki(tmp_path)
    ada = pki.tls("operator", "ada")
    async with servers(tmp_path, pki) as made:
        job = job_with(own())  # waits for a second client
        await start(made, ada, "night", job, signed(own(), job, ada))
        async with agents(made, tmp_path, ADA):
            await until(lambda: "client-0" in made.coordinator.runs["night"].state.members, "the join")
        monkeypatch.setattr("fedel_edge.job_code.utc_now", lambda: utc_now() + timedelta(days=40))
        SEEN.clear()
        async with agents(made, tmp_path, ADA):
            await until(lambda: bool(SEEN), "the join after a restart")


@asynchronous
async def test_more_bytes_than_announced_and_than_allowed_are_refused(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "ada")
    good = signed(own(), job_with(own()), operator).stored
    longer = code_pb2.StoredCode(header=good.header, text=good.text * 3)
    shorter = code_pb2.StoredCode(header=good.header, text=good.text[:-1])
    huge = code_pb2.StoredCode(header=code_pb2.CodeHeader(sha256="0" * 64, num_bytes=MAX_BYTES + 1))
    odd = code_pb2.StoredCode(header=code_pb2.CodeHeader(sha256="../" * 20, num_bytes=1))
    async with servers(tmp_path, pki) as made:
        assert "longer than" in await put(made, operator, longer)
        assert "send it again" in await put(made, operator, shorter)
        assert f"not between 1 and {MAX_BYTES}" in await put(made, operator, huge)
        assert "the hash of the job's code is not one" in await put(made, operator, odd)


@asynchronous
async def test_code_of_megabytes_travels(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    large = own(1, **{"big.py": "# " + "x" * 5_000_000 + "\n"})
    async with servers(tmp_path, pki) as made, agents(made, tmp_path, ADA, ADA):
        last = await play(made, pki.tls("operator", "ada"), "night", large)
    assert pb.RUN_PHASE_FINISHED == last.phase


def test_only_an_operator_signs(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    with pytest.raises(CertificateError, match=r"only be signed by an operator.*name the folder.*--certs"):
        signed(own(), job_with(own()), pki.tls("viewer", "vic"))
    with pytest.raises(CertificateError, match="there is none here: name its folder with --certs"):
        signed(own(), job_with(own()), Tls())
