"""Rounds with thousands of clients and models with thousands of tensors: no answer is too large."""

import time

import numpy as np
from fedel_aggregator import journal
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.run import ShardRun

from fedel.roles.aggregator import Content, Upload
from fedel.types import ModelSpec, Patch, Report, TensorSpec, Update
from fedel.v1 import aggregator_pb2 as pb
from fedel.wire.streams import fetch_model, model_header, push_model
from tests.services.aggregator.support import FEDAVG, aggregator, asynchronous, header_of, refusal, seal, send

MESSAGE_LIMIT = 4 << 20
"""Of gRPC, in bytes."""


def resnet50_names():
    """Names of ResNet50's 161 weights."""
    names = ["conv1.weight", "bn1.weight", "bn1.bias"]
    for stage, num_blocks in enumerate((3, 4, 6, 3), 1):
        for block in range(num_blocks):
            parts = [("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3")]
            parts += [("downsample.0", "downsample.1")] if block == 0 else []
            for conv, norm in parts:
                prefix = f"layer{stage}.{block}"
                names += [f"{prefix}.{conv}.weight", f"{prefix}.{norm}.weight", f"{prefix}.{norm}.bias"]
    return [f"resnet50.{name}" for name in (*names, "fc.weight", "fc.bias")]


def tiny(names):
    return ModelSpec("tiny", ("all",), tuple(TensorSpec(name, 1, (2,)) for name in names))


def zeros(spec):
    return {t.name: np.zeros(t.shape, np.float32) for t in spec.tensors}


def participants(clients):
    return [
        pb.Participant(client=client, num_samples=5, max_steps=10, max_effective_steps=100)
        for client in clients
    ]


def update_of(client, selected, values=()):
    report = Report(client, 0, 5, 7, 7.0, loss=0.5, selected=tuple(selected))
    return Update({name: Patch(np.ones(2, np.float32)) for name in values}, report)


@asynchronous
async def test_a_thousand_clients_report_all_of_resnet50(tmp_path, monkeypatch):
    spec, clients = tiny(resnet50_names()), [f"jetson-{number:04d}" for number in range(1000)]
    assert 161 == len(spec.tensors)
    names = [t.name for t in spec.tensors]
    async with aggregator(tmp_path) as (stub, _):
        await push_model(stub, model_header("run", FEDAVG, spec), zeros(spec))
        plan = pb.OpenRoundRequest(run="run", round_num=0, participants=participants(clients))
        await stub.OpenRound(plan)
    with monkeypatch.context() as patched:
        patched.setattr(journal, "sync_directory", lambda _folder: None)
        fill(ShardRun(tmp_path / "runs/run", RecycledFiles(tmp_path / "spare")), clients, names)
    async with aggregator(tmp_path) as (stub, _):
        reports = await seal(stub, 0)
        assert clients == [report.client for report in reports]
        assert sum(report.ByteSize() for report in reports) > MESSAGE_LIMIT
        request = pb.CommitRoundRequest(run="run", round_num=0, clients=clients)
        answer = await stub.CommitRound(request)
        assert (1, 1000) == (answer.version, answer.num_clients[0])
        assert reports == await seal(stub, 0), "also after the commit"
        begun = time.process_time()
        assert [1.0, 1.0] == (await fetch_model(stub, "run")).tensors[names[0]].tolist()
        assert time.process_time() - begun < 1.0, "a download does not read all reports"
        facts = tmp_path / "runs/run/versions/000001.json"
        assert facts.stat().st_size < 1000 * 200 + 161 * 200


def fill(run, clients, names):
    """Reports about all tensors, and new values of one, of all clients; without a connection for each."""
    for client in clients:
        header = header_of(update_of(client, names, names[:1]))
        upload = Upload(client, Content(0, header.digest))
        part = run.begin(upload, header)
        part.append([np.ones(2, np.float32).tobytes()])
        assert run.take(part)
        part.close()


@asynchronous
async def test_ten_thousand_participants_and_two_thousand_tensors(tmp_path):
    spec = tiny([f"encoder.layer.{number}.attention.output.dense.weight" for number in range(2000)])
    clients = [f"{'device of a long name ' * 4}{number:05d}" for number in range(10_000)]
    async with aggregator(tmp_path) as (stub, _):
        await push_model(stub, model_header("run", FEDAVG, spec), zeros(spec))
        plan = pb.OpenRoundRequest(run="run", round_num=0, participants=participants(clients))
        await stub.OpenRound(plan)
        name = spec.tensors[7].name
        await send(stub, update_of(clients[9_999], [], [name]))
        request = pb.CommitRoundRequest(run="run", round_num=0, clients=clients[9_999:])
        answer = await stub.CommitRound(request)
        assert (1, 2000) == (answer.version, len(answer.tensors))
        assert [name] == list((await fetch_model(stub, "run", have_version=0)).tensors)
        # Names of clients that sent nothing: the request is read, and the answer has as many of them as fit.
        everyone = pb.CommitRoundRequest(run="run", round_num=1, clients=clients)
        assert ("FAILED_PRECONDITION", "missing") == await refusal(stub.CommitRound(everyone))
