"""A run that is deleted: nothing of it stays, whatever state its files were in, and the other runs go on."""

from fedel.v1 import aggregator_pb2 as pb
from fedel.wire.streams import fetch_model
from tests.services.aggregator.support import aggregator, asynchronous, bits, create, first_model, refusal


@asynchronous
async def test_a_deleted_run_is_gone_and_its_name_is_free(tmp_path):
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        await create(stub, run="other")
        servicer.refresh()
        looked = await stub.DeleteRun(pb.DeleteRunRequest(run="run", dry_run=True))
        deleted = await stub.DeleteRun(pb.DeleteRunRequest(run="run"))
        assert looked.num_bytes == deleted.num_bytes > sum(values.nbytes for values in first_model().values())
        assert 0 == (await stub.DeleteRun(pb.DeleteRunRequest(run="run"))).num_bytes
        assert ("NOT_FOUND", "unknown_run") == await refusal(fetch_model(stub, "run"))
        assert ["other"] == [path.name for path in (tmp_path / "runs").iterdir()]
        assert [] == list((tmp_path / "deleted").iterdir())
        servicer.refresh()
        assert servicer.registry.get_sample_value("fedel_model_version", {"run": "run"}) is None
        again = first_model(seed=1)
        assert 0 == await create(stub, again)
        assert bits(again) == bits((await fetch_model(stub, "run")).tensors)
    async with aggregator(tmp_path) as (stub, _):
        assert 0 == (await fetch_model(stub, "other")).version


@asynchronous
async def test_a_damaged_run_can_be_deleted(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
    for file in (tmp_path / "runs" / "run" / "versions").iterdir():
        file.write_bytes(b"?")
    async with aggregator(tmp_path) as (stub, _):
        assert "damaged" == (await refusal(fetch_model(stub, "run")))[1]
        assert (await stub.DeleteRun(pb.DeleteRunRequest(run="run"))).num_bytes > 0
        assert 0 == await create(stub)


@asynchronous
async def test_what_a_crash_left_half_deleted_is_removed_at_the_next_start(tmp_path):
    (tmp_path / "deleted" / "run-1").mkdir(parents=True)
    (tmp_path / "deleted" / "run-1" / "header").write_bytes(b"x")
    async with aggregator(tmp_path) as (stub, _):
        assert not (tmp_path / "deleted").exists()
        assert ("INVALID_ARGUMENT", "header") == await refusal(stub.DeleteRun(pb.DeleteRunRequest(run="")))
        assert 0 == (await stub.DeleteRun(pb.DeleteRunRequest(run="../lock"))).num_bytes
        assert (tmp_path / "lock").exists()
