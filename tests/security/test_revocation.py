"""Revoking wins: whatever a device does meanwhile, none of its certificates is good afterwards."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fedel_coordinator import enrolment

from fedel.errors import CertificateError
from fedel.security import certificates as x
from fedel.security.authority import Authority, EarlyRenewal
from fedel.security.folder import CRL, ensure_key, install, load
from fedel.security.identity import Identity
from fedel.security.tls import Tls
from fedel.v1 import enrolment_pb2 as pb
from fedel.v1.enrolment_pb2_grpc import EnrolmentServiceStub
from fedel.wire.channel import connect
from tests.security.support import Pki, refusal, servers
from tests.services.coordinator.support import asynchronous

DEVICE = Identity("agent", "mallory")
AT_ONCE = 8


def revoke_in_another_process(authority: Path, identity: Identity = DEVICE) -> None:
    command = [sys.executable, "-m", "fedel.cli.main", "certs", "revoke", identity.name]
    subprocess.run([*command, "--authority", str(authority)], check=True, capture_output=True, timeout=60)


def usable(pki: Pki, certificates: list[bytes]) -> int:
    """Certificates that the list does not name."""
    authority = pki.authority
    revoked = x.read_revocation_list((authority.folder / CRL).read_bytes(), [authority.ca], CRL).revoked
    return sum(x.facts_of_pem(cert).serial not in revoked for cert in certificates)


@pytest.mark.parametrize("race", range(3))
def test_a_device_that_renews_in_a_loop_loses(tmp_path: Path, race: int) -> None:
    pki = Pki(tmp_path)
    old = load(pki.due("agent", DEVICE.name).folder)
    request = x.new_request(ensure_key(tmp_path / "agent-mallory"))
    got, ended, enough = [old.cert], threading.Event(), threading.Event()

    def renew() -> None:
        while not ended.is_set():
            try:
                got.append(pki.authority.renew(request, old.facts))
            except CertificateError:
                return
            if len(got) > 5 * AT_ONCE:
                enough.set()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        racing = [pool.submit(renew) for _ in range(AT_ONCE)]
        try:
            assert enough.wait(30)
            revoke_in_another_process(pki.authority.folder)
        finally:
            # Nobody needs to be told to stop: the next renewal is refused.
            for one in racing:
                one.result(timeout=30)
            ended.set()
    assert len(got) > 5 * AT_ONCE
    assert 0 == usable(pki, got)


@asynchronous
async def test_the_same_over_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "RENEW_BURST", 1_000_000)
    pki = Pki(tmp_path)
    tls = pki.due("agent", DEVICE.name)
    request = pb.RenewRequest(signing_request=x.new_request(ensure_key(tls.folder)))
    got: list[bytes] = []
    async with servers(tmp_path, pki) as made, connect(made.coordinator_address, tls) as channel:
        stub = EnrolmentServiceStub(channel)

        async def renew_until_refused() -> tuple[str, str]:
            async def forever() -> None:
                while True:
                    got.append((await stub.Renew(request)).certificates)

            return await refusal(forever())

        racing = [asyncio.create_task(renew_until_refused()) for _ in range(AT_ONCE)]
        while len(got) < 2 * AT_ONCE:
            await asyncio.sleep(0)
        await asyncio.to_thread(revoke_in_another_process, pki.authority.folder)
        assert {("UNAUTHENTICATED", "revoked")} == set(await asyncio.gather(*racing))
        assert 0 == usable(pki, got)
        for cert in got[-AT_ONCE:]:
            install(tls.folder, load(tls.folder).ca, cert)
            async with connect(made.coordinator_address, tls) as again:
                call = EnrolmentServiceStub(again).Renew(request)
                assert ("UNAUTHENTICATED", "revoked") == await refusal(call)


def test_a_revoked_name_renews_nothing_whatever_the_serial_until_it_enrols(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    tls = pki.due("agent", DEVICE.name)
    request = x.new_request(ensure_key(tls.folder))
    own, key = pki.authority, ensure_key(tls.folder).public_key()
    unrecorded = x.facts_of(x.sign(own._key, own.ca, key, DEVICE, (), 30, x.utc_now()))
    pki.authority.revoke(DEVICE)
    for facts in (load(tls.folder).facts, unrecorded):
        with pytest.raises(CertificateError, match="is revoked"):
            Authority(pki.authority.folder).renew(request, facts, early=True)
    _, cert = pki.authority.redeem(pki.authority.promise(DEVICE).secret, request)
    pki.authority.renew(request, x.facts_of_pem(cert), early=True)


def test_no_renewal_before_two_thirds_of_the_time(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    own = load(pki.tls("agent", "a").folder)
    with pytest.raises(EarlyRenewal, match="two thirds"):
        pki.authority.renew(x.new_request(ensure_key(tmp_path / "agent-a")), own.facts)


@asynchronous
async def test_early_and_frequent_renewals_are_refused(tmp_path: Path) -> None:
    pki = Pki(tmp_path)

    async def renew(tls: Tls) -> tuple[str, str]:
        message = pb.RenewRequest(signing_request=x.new_request(ensure_key(tls.folder)))
        async with connect(made.coordinator_address, tls) as channel:
            return await refusal(EnrolmentServiceStub(channel).Renew(message))

    async with servers(tmp_path, pki) as made:
        assert ("FAILED_PRECONDITION", "early") == await renew(pki.tls("agent", "a"))
        tls = pki.due("agent", "b")
        message = pb.RenewRequest(signing_request=x.new_request(ensure_key(tls.folder)))
        async with connect(made.coordinator_address, tls) as channel:
            for _ in range(enrolment.RENEW_BURST):
                await EnrolmentServiceStub(channel).Renew(message)
        assert ("RESOURCE_EXHAUSTED", "rate") == await renew(tls)
        assert 1 == await made.refused("early") == await made.refused("rate")
