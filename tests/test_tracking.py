"""A run at an MLflow server: what is sent, and that nothing the server does is in the way of the run."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from safetensors.numpy import load_file

from fedel import tracking
from fedel.errors import ConfigError
from tests.report.fakes import round_record
from tests.simulation.test_cli_simulate import fedel_simulate, job_file  # noqa: F401
from tests.strategies.fakes import same_bits

PATIENCE_SECONDS = 60.0
SETTINGS = {"seed": 3, "work": {"lr": 0.1}}


class StandIn:
    """Answers as MLflow does, and keeps what it was asked; ``trouble`` makes it do something else."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.trouble = ""
        self.released = threading.Event()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                stand_in.headers.append(dict(self.headers))
                if stand_in.trouble == "hang":
                    stand_in.released.wait(PATIENCE_SECONDS)
                    return
                code, answer = stand_in.answer(self.command, self.path, content)
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        codes = {"refuse": 403, "broken": 503, "redirect": 302}
        if self.trouble in codes:
            return codes[self.trouble], b"not today"
        if self.trouble == "nonsense":
            return 200, b"<html>"
        what = path.removeprefix("/api/2.0/").removeprefix("mlflow/")
        self.asked.append((method, what, json.loads(content) if method == "POST" else content))
        if what.startswith("experiments/get-by-name"):
            return 404, b"{}"
        answers = {
            "experiments/create": {"experiment_id": "7"},
            "runs/create": {
                "run": {"info": {"run_id": "r1", "artifact_uri": "mlflow-artifacts:/7/r1/artifacts"}}
            },
            "runs/update": {"run_info": {"run_id": "r1", "artifact_uri": "mlflow-artifacts:/7/r1/artifacts"}},
        }
        return 200, json.dumps(answers.get(what, {})).encode()

    def metrics(self, key: str) -> list[tuple[int, float]]:
        batches = [sent.get("metrics", ()) for _, what, sent in self.asked if what == "runs/log-batch"]
        return [(m["step"], m["value"]) for batch in batches for m in batch if m["key"] == key]

    def last(self, what: str) -> Any:
        return [sent for _, asked, sent in self.asked if asked == what][-1]


@contextmanager
def serving(stand_in: StandIn) -> Iterator[StandIn]:
    thread = threading.Thread(target=lambda: stand_in.server.serve_forever(0.01))
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.released.set()
        stand_in.server.shutdown()
        stand_in.server.server_close()
        thread.join()


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(tracking, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(tracking, "LONGEST_PAUSE_SECONDS", 0.01)
    with serving(StandIn()) as stand_in:
        yield stand_in


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said about MLflow; other tests may leave things that complain when they are collected."""
    return [record.getMessage() for record in caplog.records if record.name == tracking.__name__]


def until(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_settings_rounds_and_files_are_sent(mlflow, tmp_path):
    (tmp_path / "result.json").write_text("{}")
    with tracking.tracked(mlflow.address + "/", tmp_path, SETTINGS) as track:
        for number in range(3):
            track(round_record(round=number, accuracy=None if number == 1 else 0.25))
        (tmp_path / "report.html").write_text("<p>")
    params = [p for _, what, sent in mlflow.asked if what == "runs/log-batch" for p in sent.get("params", ())]
    assert [{"key": "seed", "value": "3"}, {"key": "work.lr", "value": "0.1"}] == params
    assert [(1, 0.25), (3, 0.25)] == mlflow.metrics("model/accuracy")
    assert [1, 2, 3] == [step for step, _ in mlflow.metrics("round/num_updates")]
    assert tmp_path.name == mlflow.last("runs/create")["run_name"]
    assert ("7", "fedel") == (
        mlflow.last("runs/create")["experiment_id"],
        mlflow.last("experiments/create")["name"],
    )
    files = {what: content for method, what, content in mlflow.asked if method == "PUT"}
    place = "mlflow-artifacts/artifacts/7/r1/artifacts"
    assert {f"{place}/result.json": b"{}", f"{place}/report.html": b"<p>"} == files
    assert "FINISHED" == mlflow.last("runs/update")["status"]


def test_many_settings_come_in_batches_that_mlflow_takes(mlflow, tmp_path):
    many = {f"key{n}": "x" * 1000 for n in range(250)}
    with tracking.tracked(mlflow.address, tmp_path, many) as track:
        track(round_record())
    sizes = [len(sent["params"]) for _, what, sent in mlflow.asked if "log-batch" in what and "params" in sent]
    assert [100, 100, 50] == sizes
    assert {500} == {
        len(p["value"]) for _, what, s in mlflow.asked if "log-batch" in what for p in s.get("params", ())
    }


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (ValueError, "FAILED")])
def test_a_run_that_ends_early(mlflow, tmp_path, error, status):
    def run() -> None:
        with tracking.tracked(mlflow.address, tmp_path, SETTINGS) as track:
            track(round_record())
            raise error

    with pytest.raises(error):
        run()
    assert status == mlflow.last("runs/update")["status"]


def test_a_run_without_a_round_is_not_begun(mlflow, tmp_path):
    with tracking.tracked(mlflow.address, tmp_path, SETTINGS):
        pass
    assert [] == mlflow.asked


def test_a_server_that_comes_back_gets_what_it_missed(mlflow, tmp_path, caplog):
    mlflow.trouble = "broken"
    with tracking.tracked(mlflow.address, tmp_path, SETTINGS) as track:
        for number in range(3):
            track(round_record(round=number, accuracy=0.5))
        until(lambda: len(mlflow.headers) > 3)
        mlflow.trouble = ""
        until(lambda: len(mlflow.metrics("model/accuracy")) == 3)
    assert [1, 2, 3] == [step for step, _ in mlflow.metrics("model/accuracy")]
    (warning,) = warnings(caplog)
    assert "HTTP 503); FedEL tries again. The run goes on" in warning


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("refuse", "HTTP 403 not today"),
        ("redirect", "HTTP 302"),
        ("broken", "HTTP 503"),
        ("nonsense", "Expecting value"),
        ("hang", "timed out"),
    ],
)
@pytest.mark.parametrize("rounds_before", [0, 1])
def test_trouble_costs_a_warning_and_no_time(
    mlflow, tmp_path, caplog, monkeypatch, trouble, said, rounds_before
):
    with tracking.tracked(mlflow.address, tmp_path, SETTINGS) as track:
        for number in range(rounds_before):
            track(round_record(round=number, accuracy=0.5))
        until(lambda: len(mlflow.metrics("model/accuracy")) == rounds_before)
        mlflow.trouble = trouble
        if trouble == "hang":
            monkeypatch.setattr(tracking, "REQUEST_SECONDS", 0.1)
        begin = time.monotonic()
        for number in range(rounds_before, 5000):
            track(round_record(round=number))
        assert time.monotonic() - begin < PATIENCE_SECONDS / 2
        until(lambda: warnings(caplog))
    first, last = warnings(caplog)
    assert said in first
    assert "has not got all of this run" in last


def test_the_queue_is_bounded(mlflow, tmp_path):
    mlflow.trouble = "hang"
    tracker = tracking.Mlflow(mlflow.address, tmp_path, SETTINGS)
    for number in range(tracking.MAX_WAITING + 500):
        tracker.round_done(round_record(round=number))
    assert tracking.MAX_WAITING >= tracker._waiting.qsize()
    mlflow.released.set()
    tracker.close("FAILED")


def test_a_server_that_dies_in_mid_run(tmp_path, caplog, monkeypatch):
    with tracking.tracked((stand_in := StandIn()).address, tmp_path, SETTINGS) as track:
        with serving(stand_in):
            track(round_record(accuracy=0.5))
            until(lambda: stand_in.metrics("model/accuracy"))
        track(round_record(round=1))
        until(lambda: warnings(caplog))
    assert "refused" in warnings(caplog)[0]  # the connection


def test_the_environment_names_the_server(mlflow, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.address)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "night shift")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    with tracking.tracked("", tmp_path, SETTINGS) as track:
        track(round_record())
    assert "night shift" == mlflow.last("experiments/create")["name"]
    expected = "Basic " + base64.b64encode(b"ada:secret").decode()
    assert {expected} == {headers["Authorization"] for headers in mlflow.headers}


@pytest.mark.parametrize("value", ["", "sqlite:///mlflow.db", "databricks", "./mlruns"])
def test_without_an_address_of_a_server_nothing_happens(tmp_path, monkeypatch, value):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", value)
    with tracking.tracked("", tmp_path, SETTINGS) as track:
        track(round_record())
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("host:5000", "write it as http"),
        ("file:///etc", "write it as http"),
        ("http://a:b@host", "no password"),
    ],
)
def test_addresses_that_are_none(tmp_path, address, said):
    with pytest.raises(ConfigError, match=said), tracking.tracked(address, tmp_path, SETTINGS):
        pass


def test_simulate_with_and_without_a_server_gives_the_same_bits(mlflow, job_file, tmp_path, capfd):  # noqa: F811
    """A run that is resumed goes on under the same number there."""
    words = ("--out", tmp_path, "--executor", "serial")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert 0 == fedel_simulate(job_file, *words, "--name", "away", "--mlflow", away)
    assert 0 == fedel_simulate(job_file, *words, "--name", "there", "--mlflow", mlflow.address)
    assert same_bits(*(load_file(tmp_path / name / "model.safetensors") for name in ("away", "there")))
    assert [1, 2] == [step for step, _ in mlflow.metrics("model/accuracy")]
    assert any(what.endswith("/report.html") for _, what, _ in mlflow.asked)
    more = ("--resume", "--set", "rounds.num_rounds=3")
    assert 0 == fedel_simulate(job_file, *words, "--name", "there", *more, "--mlflow", mlflow.address)
    assert [1, 2, 3] == [step for step, _ in mlflow.metrics("model/accuracy")]
    assert 1 == len([what for _, what, _ in mlflow.asked if what == "runs/create"])


@pytest.mark.slow
def test_a_real_server(job_file, tmp_path, capfd):  # noqa: F811
    """``FEDEL_MLFLOW`` names the program if it is not on the PATH; with its packages it takes 850 MB."""
    program = os.environ.get("FEDEL_MLFLOW") or shutil.which("mlflow")
    if not program:
        pytest.skip("mlflow is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    store = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/ml.db",
        "--artifacts-destination",
        str(tmp_path / "files"),
    ]
    command = [program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        until_it_answers(process, f"{address}/health")
        words = ("--out", tmp_path, "--executor", "serial", "--name", "night", "--mlflow", address)
        assert 0 == fedel_simulate(job_file, *words)
        assert 0 == fedel_simulate(job_file, *words, "--resume", "--set", "rounds.num_rounds=3")
        run_id = json.loads((tmp_path / "night" / "mlflow.json").read_text())["run_id"]
        run = ask(f"{address}/api/2.0/mlflow/runs/get?run_id={run_id}")["run"]
        assert ("night", "FINISHED") == (run["info"]["run_name"], run["info"]["status"])
        assert {"key": "rounds.num_participants", "value": "3"} in run["data"]["params"]
        query = f"run_id={run_id}&metric_key=model/accuracy"
        history = ask(f"{address}/api/2.0/mlflow/metrics/get-history?{query}")["metrics"]
        records = [json.loads(line) for line in (tmp_path / "night" / "rounds.jsonl").read_text().splitlines()]
        assert [(n + 1, r["accuracy"]) for n, r in enumerate(records)] == [
            (m["step"], m["value"]) for m in sorted(history, key=lambda m: m["step"])
        ]
        listed = ask(f"{address}/api/2.0/mlflow/artifacts/list?run_id={run_id}")["files"]
        assert {"config.toml", "result.json", "report.html"} == {file["path"] for file in listed}
    finally:
        os.killpg(process.pid, 15)
        process.wait(PATIENCE_SECONDS)


def until_it_answers(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + 5 * PATIENCE_SECONDS
    while True:
        assert process.poll() is None
        assert time.monotonic() < deadline
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)


def ask(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as answer:
        return json.loads(answer.read())
