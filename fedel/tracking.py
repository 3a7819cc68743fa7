"""Sends a run to an MLflow server while it goes on: its settings, the numbers of each round, its files at last.

Nothing waits for that server. Rounds go into a queue, and a thread sends them over MLflow's REST interface. If
the server is away, the thread tries again and catches up; what it could not send when the run is over is lost.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from fedel import __version__, config
from fedel.errors import ConfigError
from fedel.files import write_atomic
from fedel.records import RoundRecord
from fedel.report.scalars import of_round

ADDRESS, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
"""Variables of the environment; MLflow's own client reads them too."""
FILES = ("config.toml", "result.json", "report.html")
MAX_WAITING = 1000
"""Rounds in the queue; those that come when it is full are dropped."""
REQUEST_SECONDS = 5.0
"""How long one request may take to connect, and to send or receive a piece."""
CLOSE_SECONDS = 10.0
"""How long the end of a run waits for what is still in the queue."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
_MAX_PARAMS, _MAX_METRICS, _MAX_VALUE = 100, 1000, 500
"""MLflow's limits: entries of a request, characters of a parameter."""

OnRound = Callable[[RoundRecord], None]
_log = logging.getLogger(__name__)


def ignore(record: RoundRecord) -> None:
    """Nobody follows the run."""


class Refused(Exception):
    """The server understood and said no: another try gives the same answer."""


@contextlib.contextmanager
def tracked(address: str, directory: Path, settings: Mapping[str, Any]) -> Iterator[OnRound]:
    """Gives a function to call with each closed round; at the end of the block the files of the run are sent.

    Without an address, here or in the environment, it does nothing.
    """
    given = address or os.environ.get(ADDRESS, "")
    if not given or (not address and not given.startswith(("http://", "https://"))):
        yield ignore  # the environment may name a kind of store that only MLflow's own client knows
        return
    tracker = Mlflow(checked(given), directory, settings)
    status = "FAILED"
    try:
        yield tracker.round_done
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        tracker.close(status)


def checked(address: str) -> str:
    """The address of a server, or an error that says what is wrong with it."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--mlflow {address}: write it as http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.password:
        raise ConfigError(
            "--mlflow: put no password into the address, where others see it; set MLFLOW_TRACKING_USERNAME and"
            " MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    return address.rstrip("/")


class Mlflow:
    """One run at an MLflow server; it begins there with its first closed round."""

    def __init__(self, address: str, directory: Path, settings: Mapping[str, Any]) -> None:
        self._server = Server(address)
        self._directory, self._settings = directory, settings
        self._run: dict[str, Any] = {}
        """What the server says about the run; empty until it has begun there."""
        self._began_ms = _now_ms()
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._num_lost = 0
        self._complained = False
        self._over = threading.Event()
        """The run is over: no more pauses, and the first failure is the last."""
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def round_done(self, record: RoundRecord) -> None:
        now = _now_ms()
        metrics = [
            {"key": tag, "value": value, "timestamp": now, "step": record.round + 1}
            for tag, value in of_round(record)
            if math.isfinite(value)
        ]
        self._put(lambda: self._log(metrics=metrics))
        if self._thread.ident is None:
            self._thread.start()

    def close(self, status: str) -> None:
        """Send what is left, for a few seconds at most."""
        if self._thread.ident is None:
            return
        self._put(lambda: self._finish(status))
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._over.set()
        self._thread.join(CLOSE_SECONDS)
        unsent = self._num_lost + self._waiting.qsize()
        if unsent or self._thread.is_alive():
            _log.warning("MLflow at %s has not got all of this run; %s has it", self._server, self._directory)

    def _put(self, send: Callable[[], None]) -> None:
        try:
            self._waiting.put_nowait(send)
        except queue.Full:
            self._num_lost += 1

    def _work(self) -> None:
        if not self._done(self._start) or not self._run:
            self._num_lost += 1
            return
        while (send := self._waiting.get()) is not None:
            if not self._done(send):
                self._num_lost += 1
                return

    def _done(self, send: Callable[[], None]) -> bool:
        """Try until it is sent or refused; ``False`` if the run is over and it is not."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                send()
            except Refused as error:
                self._complain(f"refused a request: {error}")
                self._num_lost += 1
            except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
                self._complain(
                    f"does not answer as it should ({error or type(error).__name__}); FedEL tries again"
                )
                if self._over.is_set():
                    return False
                self._over.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            return True

    def _complain(self, what: str) -> None:
        if not self._complained:
            _log.warning("MLflow at %s %s. The run goes on", self._server, what)
        self._complained = True

    def _start(self) -> None:
        """Begin a run at the server, or go on with the one that the directory notes."""
        note = self._directory / "mlflow.json"
        if self._run or not note.exists() or not self._goes_on(json.loads(note.read_text(encoding="utf-8"))):
            self._run = self._run or self._create()
            leaves = config.leaves(self._settings)
            self._log(params=[{"key": key, "value": str(value)[:_MAX_VALUE]} for key, value in leaves])
            table = {"server": str(self._server), "run_id": self._run["run_id"]}
            write_atomic(note, json.dumps(table) + "\n")

    def _goes_on(self, noted: Mapping[str, Any]) -> bool:
        if noted.get("server") != str(self._server):
            return False
        try:
            answer = self._server.post("runs/update", {"run_id": noted["run_id"], "status": "RUNNING"})
        except Refused:  # deleted there
            return False
        self._run = answer["run_info"]
        return True

    def _create(self) -> dict[str, Any]:
        name = os.environ.get(EXPERIMENT) or "fedel"
        query = urllib.parse.urlencode({"experiment_name": name})
        try:
            experiment = self._server.get(f"experiments/get-by-name?{query}")["experiment"]["experiment_id"]
        except Refused:
            experiment = self._server.post("experiments/create", {"name": name})["experiment_id"]
        tags = {"mlflow.source.name": "fedel", "fedel.version": __version__, "fedel.run": self._directory.name}
        created = self._server.post(
            "runs/create",
            {
                "experiment_id": experiment,
                "run_name": self._directory.name,
                "start_time": self._began_ms,
                "tags": [{"key": key, "value": value} for key, value in tags.items()],
            },
        )
        info: dict[str, Any] = created["run"]["info"]
        return info

    def _log(self, *, params: Sequence[Any] = (), metrics: Sequence[Any] = ()) -> None:
        for kind, entries, most in (("params", params, _MAX_PARAMS), ("metrics", metrics, _MAX_METRICS)):
            for begin in range(0, len(entries), most):
                batch = list(entries[begin : begin + most])
                self._server.post("runs/log-batch", {"run_id": self._run["run_id"], kind: batch})

    def _finish(self, status: str) -> None:
        place = str(self._run.get("artifact_uri", ""))
        path = place.removeprefix("mlflow-artifacts:/")
        if path != place:  # a server that stores files itself; others want a client of the store
            for file in (self._directory / name for name in FILES):
                if file.exists():
                    self._server.put(f"{path.strip('/')}/{file.name}", file.read_bytes())
        ended = {"run_id": self._run["run_id"], "status": status, "end_time": _now_ms()}
        self._server.post("runs/update", ended)


class Server:
    """MLflow's REST interface, as far as a run needs it."""

    def __init__(self, address: str) -> None:
        self._address = address
        # An answer that sends us elsewhere would take the token there.
        self._opener = urllib.request.build_opener(_NoRedirect)

    def __str__(self) -> str:
        return self._address

    def get(self, path: str) -> Any:
        return self._ask("GET", f"api/2.0/mlflow/{path}", None, "application/json")

    def post(self, path: str, table: Mapping[str, Any]) -> Any:
        return self._ask("POST", f"api/2.0/mlflow/{path}", json.dumps(table).encode(), "application/json")

    def put(self, path: str, content: bytes) -> None:
        place = urllib.parse.quote(path)
        self._ask("PUT", f"api/2.0/mlflow-artifacts/artifacts/{place}", content, "application/octet-stream")

    def _ask(self, method: str, path: str, content: bytes | None, kind: str) -> Any:
        headers = {"Content-Type": kind, **_authorisation()}
        request = urllib.request.Request(
            f"{self._address}/{path}", data=content, headers=headers, method=method
        )
        try:
            with self._opener.open(request, timeout=REQUEST_SECONDS) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            if error.code >= 500 or error.code == 429:
                raise OSError(f"HTTP {error.code}") from None
            said = error.read(500).decode(errors="replace")
            raise Refused(f"{method} {path.partition('?')[0]}: HTTP {error.code} {said}") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _authorisation() -> dict[str, str]:
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if user := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _now_ms() -> int:
    return int(1000 * time.time())
