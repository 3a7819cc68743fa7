"""All checks of an agent; each needs the ones before it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from fedel import plugins
from fedel.errors import CertificateError, ConfigError
from fedel.job import RunConfig
from fedel.security.certificates import utc_now
from fedel.security.folder import Credentials
from fedel_edge.certificates import kept_folder, latest, with_certificate_name
from fedel_edge.config import AgentConfig
from fedel_edge.preflight import machine, reach
from fedel_edge.preflight.findings import BAD, ENROL, Finding, bad, good, skipped


async def preflight(
    config: AgentConfig, job: RunConfig | None = None, root: Path = Path("/")
) -> AsyncIterator[Finding]:
    """The findings, each as soon as its check is done."""
    async for finding in servers(config):
        yield finding
    for finding in device(config, job, root):
        yield finding


async def servers(config: AgentConfig) -> AsyncIterator[Finding]:
    """This device's certificate, the servers, and how far its clock is off theirs."""
    found, own = certificate(config)
    yield found
    if found.state == BAD:
        yield skipped("coordinator", "not connected to without a good certificate")
        yield skipped("clock", "the coordinator could not be reached for its time")
        return
    secret = config.tls.secret
    coordinator = await reach.reach("coordinator", config.coordinator, own, secret)
    yield coordinator.finding
    yield reach.clock(coordinator)
    for address in coordinator.aggregators:
        yield (await reach.reach("aggregator", address, own, secret)).finding


def device(config: AgentConfig, job: RunConfig | None, root: Path = Path("/")) -> Iterator[Finding]:
    """What is needed to train; the slowest checks come last."""
    yield machine.disk(config)
    yield machine.memory(root)
    there = machine.torch_there(config)
    yield there
    if there.state == BAD:
        yield skipped("data set", "needs torch")
        yield skipped("one step", "needs torch")
        return
    if job is not None and job.trainer != RunConfig.trainer:
        yield skipped("data set", f"the job has a trainer of its own, {job.trainer}")
        yield skipped("one step", "only that trainer knows how")
        return
    with plugins.only(config.code):
        found, data = machine.data_set(config, job)
    yield found
    if found.state == BAD:
        yield skipped("one step", "needs the data set")
        return
    with plugins.only(config.code):
        step = machine.one_step(config, job, data)
    yield step


def certificate(config: AgentConfig) -> tuple[Finding, Credentials | None]:
    """Whose certificate it is, and for how long; none without TLS."""
    check = "certificate"
    try:
        how = config.tls.check(config.coordinator)
    except ConfigError as error:
        return bad(check, f"none, and {config.coordinator} is another machine", str(error)), None
    try:
        if not config.tls.secure:
            return (good if config.tls.secret else skipped)(check, how), None
        own = latest(config.tls.folder, kept_folder(config))
        with_certificate_name(config, own)
    except CertificateError as error:
        return bad(check, str(error), ENROL), None
    except ConfigError as error:
        return bad(check, "the secret of this federation cannot be read", str(error)), None
    facts = own.facts
    left = (facts.not_after - utc_now()).total_seconds() / 86400
    due = ", about to be renewed" if facts.renewable(utc_now()) else ""
    return good(check, f"{facts.identity}, for {left:.1f} days more{due}"), own
