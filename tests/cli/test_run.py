"""``fedel run`` on a federation whose coordinator keeps the run's directory on another machine."""

import time

import pytest

from fedel.cli import run
from fedel.job import RunConfig
from fedel.report import runs
from fedel.v1 import coordinator_pb2 as pb
from tests.report.fakes import client_record, round_record
from tests.strategies.fakes import spec


def test_the_directory_is_written_from_what_was_followed(tmp_path):
    job = RunConfig.parse({"strategy": {"name": "fedel"}, "seed": 7})
    status = pb.RunStatus(
        run="night", phase=pb.RUN_PHASE_FINISHED, created_at=time.time() - 60, model_version=2, message="done"
    )
    clients = (client_record(client="one", deviation=0.25, device_type="orin"),)
    records = [round_record(round=n, version=n + 1, accuracy=0.5 - 0.1 * n, clients=clients) for n in range(2)]
    run._write_directory(tmp_path, job, spec(), status, [record.to_json() for record in records])
    stored = runs.load(tmp_path)
    result = stored.result
    assert records == stored.rounds
    assert job == RunConfig.parse(stored.settings)
    assert result is not None
    assert ("night", "finished", "done", "fedel", 7) == (
        result.run,
        result.phase,
        result.message,
        result.strategy,
        result.seed,
    )
    assert (0.4, 0.5, 0, 1, 2) == (
        result.accuracy,
        result.best_accuracy,
        result.best_round,
        result.best_version,
        result.model_version,
    )
    assert (2, 0.25, "orin") == (
        result.clients["one"].rounds_measured,
        result.clients["one"].deviation_mean,
        result.clients["one"].device_type,
    )
    assert [t.name for t in spec().weights] == list(result.tensors)
    assert 60 == pytest.approx(result.wall_seconds, abs=30)
    assert result.virtual_seconds is None
