"""Protected folds over a real aggregator: the same bits as without it, also after a restart."""

import stat
from dataclasses import asdict, replace

import pytest

from fedel.job import Protection
from fedel.roles.aggregator import RoundFold
from fedel.strategies import build
from fedel.strategies.protection import RoundStart
from fedel.types import Patch
from fedel.wire.streams import fetch_model, model_header, push_model

from .support import (
    FEDAVG,
    SPEC,
    aggregator,
    asynchronous,
    bits,
    close,
    create,
    first_model,
    make_update,
    open_round,
    refusal,
    send,
)

WEIGHTS = {t.name for t in SPEC.tensors if t.role.value != "buffer"}


def clients():
    updates = [
        make_update(name, names=WEIGHTS - {"two.exit"} if n % 2 else WEIGHTS) for n, name in enumerate("abcd")
    ]
    evil = {name: Patch(-50 * patch.values) for name, patch in updates[0].patches.items()}
    return [replace(updates[0], patches=evil), *updates[1:]]


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.5}, {"fold": "median"}, {"fold": "trimmed_mean", "clip_norm": 30.0}]
)
@asynchronous
async def test_robust_folds_restart(tmp_path, options):
    model, protection, updates = first_model(), Protection(**options), clients()
    fold = RoundFold(build(FEDAVG), SPEC, protection, RoundStart(model))
    for update in updates[::-1]:
        fold.add(update)
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, model, protection=asdict(protection))
        for update in updates[:2]:
            await send(stub, update)
    async with aggregator(tmp_path) as (stub, _):
        for update in updates[2:]:
            await send(stub, update)
        await close(stub, 0)
        made = await fetch_model(stub, "run")
    assert bits(fold.finish(model, {}).model) == bits(made.tensors)


@asynchronous
async def test_noise_has_a_secret_of_its_run(tmp_path):
    options = asdict(Protection(clip_norm=0.5, noise_multiplier=1.0, num_expected=4))
    async with aggregator(tmp_path) as (stub, _):
        refused = await refusal(create(stub, protection=options))
        assert ("INVALID_ARGUMENT", "header") == refused  # the model has batch-norm statistics
        refused = await refusal(create(stub, protection={"fold": "mode"}))
        assert ("INVALID_ARGUMENT", "header") == refused


@asynchronous
async def test_a_private_round_is_the_same_after_a_restart(tmp_path):
    plain = replace(SPEC, tensors=tuple(t for t in SPEC.tensors if t.name in WEIGHTS))
    protection = Protection(clip_norm=0.5, noise_multiplier=1.0, num_expected=4)
    model, updates = {name: first_model()[name] for name in WEIGHTS}, clients()
    async with aggregator(tmp_path) as (stub, _):
        header = model_header("run", FEDAVG, plain, protection=asdict(protection))
        await push_model(stub, header, model)
        await open_round(stub, 0)
        for update in updates:
            await send(stub, update)
    secret = tmp_path / "runs" / "run" / "noise.key"
    assert 0o600 == stat.S_IMODE(secret.stat().st_mode)
    fold = RoundFold(build(FEDAVG), plain, protection, RoundStart(model, 0, secret=secret.read_bytes()))
    for update in updates:
        fold.add(update)
    async with aggregator(tmp_path) as (stub, _):
        await close(stub, 0)
        made = await fetch_model(stub, "run")
    assert bits(fold.finish(model, {}).model) == bits(made.tensors)


@asynchronous
async def test_updates_that_are_kept_are_views_of_the_journal(tmp_path):
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub, protection={"fold": "median"})
        for update in clients():
            await send(stub, update)
        kept = [patches for patches, _ in servicer._runs._runs["run"]._fold._fold._updates]
        assert 4 == len(kept)
        assert not any(patch.values.flags.owndata for patches in kept for patch in patches.values())
