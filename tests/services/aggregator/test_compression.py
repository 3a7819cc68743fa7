"""Compressed updates over a real aggregator: the bits of restored ones, also late and after restarts."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from fedel.audit.audit import Sources, audit
from fedel.core.compression import compress_update, restored
from fedel.job import Protection
from fedel.roles.aggregator import RoundFold
from fedel.strategies import build
from fedel.strategies.protection import RoundStart
from fedel.types import Change, Update, UploadSettings
from fedel.wire.streams import fetch_model

from .support import (
    FEDAVG,
    SPEC,
    aggregator,
    asynchronous,
    bits,
    close,
    create,
    first_model,
    late_as,
    make_update,
    refusal,
    refusals,
    send,
)

INT8 = UploadSettings("int8")
UPLOADS = [UploadSettings("fp16"), INT8, UploadSettings("topk"), UploadSettings("topk", 0.01)]


def compressed(upload, client, model, round_num=0, names=None):
    """A compressed update of a client that started from this model."""
    return compress_update(upload, SPEC, make_update(client, round_num, names), model, {})[0]


def folded(upload, model, updates, protection=None):
    """What compressed updates, each with the model that it started from, make of a model."""
    fold = RoundFold(build(FEDAVG), SPEC, protection or Protection(), RoundStart(model))
    for sent, start in updates:
        update = restored(upload, sent, start)
        fold.add(update if start is model else late_as(update, 1.0, start, model))
    return fold.finish(model, {}).model


@pytest.mark.parametrize(
    "protection", [Protection(), Protection(fold="median"), Protection(clip_norm=0.5)], ids=str
)
@pytest.mark.parametrize("upload", UPLOADS, ids=str)
@asynchronous
async def test_compressed_updates_restart(tmp_path, upload, protection):
    model = first_model()
    updates = [compressed(upload, name, model) for name in "abcd"]
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, model, upload=asdict(upload), protection=asdict(protection))
        for update in updates[:2]:
            sent = await send(stub, update)
            assert sent.num_bytes < 0.6 * sum(4 * t.size for t in SPEC.tensors)
    async with aggregator(tmp_path) as (stub, _):
        assert (await send(stub, updates[0])).duplicate
        for update in updates[2:]:
            await send(stub, update)
        await close(stub, 0)
        made = await fetch_model(stub, "run")
    assert bits(folded(upload, model, [(u, model) for u in updates], protection)) == bits(made.tensors)


@pytest.mark.parametrize("keep_updates", [2, -1])
@asynchronous
async def test_late_ones_are_restored_from_the_version_of_their_round(tmp_path, keep_updates):
    """Also after a restart, and by an audit that begins with a round in which one is late."""
    models = [first_model()]
    async with aggregator(tmp_path, keep_updates=keep_updates) as (stub, _):
        await create(stub, models[0], late="next", upload=asdict(INT8))
    for round_num in range(5):
        now, before = models[-1], models[max(0, round_num - 1)]
        late = [(compressed(INT8, "b", before, round_num - 1), before)] if round_num else []
        # Client b is late in every round, and c every time in between.
        updates = [(compressed(INT8, name, now, round_num), now) for name in ("a", "c")] + late
        async with aggregator(tmp_path, keep_updates=keep_updates) as (stub, _):
            for update, _ in updates[1:]:
                await send(stub, update)
        async with aggregator(tmp_path, keep_updates=keep_updates) as (stub, _):
            await send(stub, updates[0][0])
            await close(stub, round_num)
            made = await fetch_model(stub, "run")
        models.append(folded(INT8, now, updates))
        assert bits(models[-1]) == bits(made.tensors), round_num
    found = audit(Sources("run", (tmp_path,)))
    assert () == found.findings
    assert (3 if keep_updates == 2 else 5) == found.num_recomputed


@asynchronous
async def test_an_update_in_another_form_is_refused(tmp_path):
    model = first_model()
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub, model, run="plain")
        await create(stub, model, upload=asdict(INT8))
        sent = compressed(INT8, "a", model)
        assert ("INVALID_ARGUMENT", "compressed") == await refusal(send(stub, sent, "plain"))
        halves = compressed(UploadSettings("fp16"), "a", model)
        assert ("INVALID_ARGUMENT", "size") == await refusal(send(stub, halves))
        mean = Change(np.zeros(8, np.uint8), (4,))
        wrong = replace(sent, patches={**sent.patches, "one.mean": mean})
        assert ("INVALID_ARGUMENT", "compressed") == await refusal(send(stub, wrong))
        for scale in (np.nan, np.inf, -1.0):
            data = sent.patches["one.weight"].data.copy()
            data[:4] = np.array([scale], "<f4").view(np.uint8)
            wrong = replace(sent, patches={**sent.patches, "one.weight": Change(data, (4, 3))})
            assert ("INVALID_ARGUMENT", "not_finite") == await refusal(send(stub, wrong))
        assert {"compressed": 2, "size": 1, "not_finite": 3} == refusals(servicer)
        await send(stub, compressed(INT8, "b", model))
        # One that is not compressed is welcome too.
        await send(stub, make_update("c"))
        await close(stub, 0)
        made = await fetch_model(stub, "run")
    plain = make_update("c")
    counted = [(compressed(INT8, "b", model), model), (Update(plain.patches, plain.report), model)]
    assert bits(folded(INT8, model, counted)) == bits(made.tensors)


@asynchronous
async def test_a_run_with_an_unknown_form_is_refused(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        for upload in ({"compression": "zip"}, {"compression": "topk", "share": 0.0}, {"form": 1}):
            assert ("INVALID_ARGUMENT", "header") == await refusal(create(stub, upload=upload))
        masked = create(stub, upload=asdict(INT8), protection={"secure": True})
        assert ("INVALID_ARGUMENT", "header") == await refusal(masked)
