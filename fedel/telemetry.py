"""Every metric that FedEL exports. Each class takes a registry, so that tests can pass their own.

Agents are usually behind routers and cannot be scraped, so the coordinator exports what they report.
"""

from __future__ import annotations

import math
import platform

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.metrics import MetricWrapperBase

from fedel import __version__
from fedel.client_tests import ClientTests
from fedel.records import ClientRecord, RoundRecord

MAX_CLIENTS = 1000
"""At most this many clients of a run get their own time series; the histograms cover all clients."""
MAX_TENSORS = 1000
PHASES = ("wait", "download", "train", "upload", "fold", "commit", "evaluate")
OVER_BUDGET_RATIO = 0.2
"""A client whose training took longer than T_th by more than this share is over budget."""
UPLOAD_OUTCOMES = ("accepted", "duplicate", "refused", "broken")
MAX_DEVICE_TYPES = 50
"""At most this many device types have a histogram of their own; the rest shares one."""
MESSAGE_REFUSALS = ("superseded", "unknown_run", "join", "done", "progress", "evaluation", "session")
"""Why a coordinator refuses a message: a second session, a run that it does not have; a join, report, progress
or test that cannot be true; a session that sends too much."""
ACCESS_REFUSALS = ("certificate", "expired", "revoked", "role", "client", "token", "secret", "early", "rate")
"""Why a call is refused: no identity, an expired or revoked certificate, a missing right, a wrong name, a token
or secret that is not right, a certificate that is not due for renewal, too many calls."""
REFUSALS = (
    *("checksum", "compressed", "conflict", "digest", "disk", "dtype", "duplicate", "early", "empty", "ended"),
    *("full", "header", "idle", "late", "masked", "missing", "not_finite", "not_open", "other_round", "range"),
    *("report", "sealed", "secure", "shape", "size", "slow", "starting", "steps", "superseded", "unknown_run"),
    *("unknown_tensor", "unknown_version", "unplanned", "weight"),
)
"""Every reason of ``UpdateRefused``. Counters start at 0: ``increase()`` misses one that appears as 1."""

_LATENCY = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_DEVIATION = (-0.75, -0.5, -0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0)


def build_info(registry: CollectorRegistry, service: str) -> None:
    """Version information of a service."""
    info = Info("fedel_build", "Version of FedEL and of Python", registry=registry)
    info.info({"version": __version__, "service": service, "python": platform.python_version()})


class AccessMetrics:
    """Refused calls and the expiry of the server's certificate; the same for every server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.refused = Counter(
            "fedel_calls_refused_total", "Calls refused, by reason", ["reason"], registry=registry
        )
        for reason in ACCESS_REFUSALS:
            self.refused.labels(reason)
        self.certificate_expiry = Gauge(
            "fedel_certificate_expiry_timestamp_seconds",
            "Unix time at which the server's own certificate expires; 0 if it has none",
            registry=registry,
        )
        self.list_fetched = Gauge(
            "fedel_revocation_list_fetched_timestamp_seconds",
            "Unix time at which the revocation list was last fetched; 0 if it is not fetched, or was not yet",
            registry=registry,
        )


class CoordinatorMetrics:
    """What the coordinator knows about rounds and clients."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.round_latency = Histogram(
            "fedel_round_latency_seconds",
            "Seconds from the first task of a round to its new model",
            ["run"],
            buckets=_LATENCY,
            registry=registry,
        )
        self.round_last_latency = gauge(
            "fedel_round_last_latency_seconds",
            "Seconds from the first task of the last round to its new model",
            "run",
        )
        self.round_phase = gauge(
            "fedel_round_phase_seconds",
            "Seconds of a phase in the last round; for phases on devices, the longest of all clients",
            "run",
            "phase",
        )
        self.rounds = counter("fedel_rounds_total", "Rounds closed, by outcome", "run", "outcome")
        self.round_number = gauge("fedel_round_number", "Number of the open round, counted from 0", "run")
        self.round_started = gauge(
            "fedel_round_opened_timestamp_seconds",
            "Unix time at which the open round was opened; 0 if no round is open",
            "run",
        )
        self.round_deadline = gauge(
            "fedel_round_deadline_seconds",
            "Seconds after which the open round may close without all clients",
            "run",
        )
        self.run_active = gauge(
            "fedel_run_active",
            "1 while the run is running or stopping; 0 while it waits, is paused or has ended",
            "run",
        )
        self.budget = gauge("fedel_budget_seconds", "T_th of one training step", "run")

        self.deviation = Histogram(
            "fedel_budget_deviation_ratio",
            "Time that counts against T_th divided by T_th, minus one, of every client and round",
            ["run", "device_type"],
            buckets=_DEVIATION,
            registry=registry,
        )
        per_client = ("run", "client")
        self.client_deviation = gauge(
            "fedel_client_budget_deviation_ratio",
            "Time that counts against T_th divided by T_th, minus one, in the last round",
            *per_client,
        )
        self.client_slowness = gauge(
            "fedel_client_slowness_ratio",
            "How many times slower than its timing profile the client trained in the rounds before",
            *per_client,
        )
        self.client_over_budget = gauge(
            "fedel_client_over_budget_rounds",
            "Rounds in a row in which the client took more than 1.2 T_th, since the coordinator started",
            *per_client,
        )
        self.client_planned = gauge(
            "fedel_client_planned_seconds", "Training seconds predicted from the profile", *per_client
        )
        self.client_measured = gauge("fedel_client_train_seconds", "Training seconds measured", *per_client)
        self.client_front = gauge(
            "fedel_client_window_front_block",
            "Last block of the window (its deep edge); 0 if there is no window",
            *per_client,
        )
        self.client_end = gauge(
            "fedel_client_window_end_block",
            "First block of the window (its shallow edge); 0 if there is no window",
            *per_client,
        )
        self.client_resets = gauge(
            "fedel_client_window_resets", "How often the window started again at the input", *per_client
        )
        self.client_selected = gauge(
            "fedel_client_selected_tensors", "Tensors trained in the last round", *per_client
        )
        self.client_memory = gauge("fedel_client_peak_memory_bytes", "Peak memory while training", *per_client)
        self.client_power = gauge(
            "fedel_client_power_watts", "Mean power while training, if known", *per_client
        )
        self.client_energy = counter(
            "fedel_client_energy_joules_total", "Energy of training, if known", *per_client
        )
        self.client_temperature = gauge(
            "fedel_client_temperature_celsius", "Highest temperature while training, if known", *per_client
        )
        self.client_seen = gauge(
            "fedel_client_last_seen_timestamp_seconds",
            "Unix time of the last message from the client",
            *per_client,
        )
        self.bytes_up = counter("fedel_client_upload_bytes_total", "Bytes that the client sent", *per_client)
        self.bytes_down = counter(
            "fedel_client_download_bytes_total", "Bytes that the client received", *per_client
        )
        self.bytes_sent = counter(
            "fedel_bytes_sent_total", "Bytes sent in each direction, all clients together", "run", "direction"
        )
        self.bytes_saved = counter(
            "fedel_bytes_saved_total",
            "Bytes saved in each direction compared with sending the full model",
            "run",
            "direction",
        )

        self.coverage = gauge(
            "fedel_tensor_clients", "Clients that trained the tensor in the last round", "run", "tensor"
        )
        self.untrained = gauge(
            "fedel_tensor_untrained_rounds", "Rounds since any client trained the tensor", "run", "tensor"
        )
        self.accuracy = gauge("fedel_model_accuracy_ratio", "Test accuracy of the newest tested model", "run")
        self.test_loss = gauge("fedel_model_test_loss", "Test loss of the newest tested model", "run")
        self.own_accuracy = gauge(
            "fedel_clients_accuracy_ratio",
            "Accuracy of the newest model on the clients' own data: mean, weighted, worst, deviation",
            "run",
            "statistic",
        )
        self.own_type_accuracy = gauge(
            "fedel_device_type_accuracy_ratio",
            "Mean accuracy of the newest model on the own data of clients of one device type",
            "run",
            "device_type",
        )
        self.train_loss = gauge("fedel_model_train_loss", "Mean training loss of the last round", "run")
        self.bias = gauge(
            "fedel_round_bias_o1",
            "O1 of the last round: bias because clients train different parts of the model",
            "run",
        )
        self.diverged = gauge(
            "fedel_model_not_finite", "1 if the training loss of the last round is NaN or infinite", "run"
        )
        self.sessions = gauge("fedel_sessions", "Agents with an open session")
        self.heartbeats = counter("fedel_heartbeats_total", "Heartbeats received")
        self.tasks_failed = counter("fedel_tasks_failed_total", "Tasks that an agent could not finish", "run")
        self.refused = counter(
            "fedel_messages_refused_total", "Messages of agents that were refused, by reason", "reason"
        )
        for reason in MESSAGE_REFUSALS:
            self.refused.labels(reason)
        self._by_run: list[MetricWrapperBase] = [
            metric
            for metric in vars(self).values()
            if isinstance(metric, MetricWrapperBase) and "run" in metric._labelnames
        ]
        self._labelled: dict[str, set[str]] = {}
        self._device_types: set[str] = set()

    def device_label(self, device_type: str) -> str:
        """The label of a device type; agents choose its name, so there is a limit to them."""
        if len(self._device_types) < MAX_DEVICE_TYPES:
            self._device_types.add(device_type)
        return (device_type or "unknown") if device_type in self._device_types else "other"

    def labelled(self, run: str, client: str) -> bool:
        """Whether the client has its own time series; the first thousand clients of a run do."""
        known = self._labelled.setdefault(run, set())
        if client not in known and len(known) < MAX_CLIENTS:
            known.add(client)
        return client in known

    def forget(self, run: str) -> None:
        """Remove every time series of an ended run: the coordinator may run for years."""
        self._labelled.pop(run, None)
        for metric in self._by_run:
            metric.remove_by_labels({"run": run})

    def observe_round(self, run: str, record: RoundRecord, model_bytes: int) -> None:
        """Update the metrics from one line of ``rounds.jsonl``."""
        self.round_latency.labels(run).observe(record.latency_seconds)
        self.round_last_latency.labels(run).set(record.latency_seconds)
        self.rounds.labels(run, "closed" if record.num_updates >= record.num_tasks else "partial").inc()
        self.budget.labels(run).set(record.budget_seconds)
        self.bias.labels(run).set(record.o1)
        for phase, seconds in record.phases.items():
            self.round_phase.labels(run, phase).set(seconds)
        # A line that was read from a file has null where the loss was NaN.
        loss = math.nan if record.loss is None else record.loss
        finite = math.isfinite(loss)
        if finite:
            self.train_loss.labels(run).set(loss)
        self.diverged.labels(run).set(0 if finite or not record.num_updates else 1)
        for entry in record.clients:
            self._observe_client(run, entry, model_bytes)
        for tensor, num_clients in list(record.tensor_clients.items())[:MAX_TENSORS]:
            self.coverage.labels(run, tensor).set(num_clients)
        for tensor, rounds in list(record.tensor_untrained_rounds.items())[:MAX_TENSORS]:
            self.untrained.labels(run, tensor).set(rounds)

    def _observe_client(self, run: str, entry: ClientRecord, model_bytes: int) -> None:
        if entry.deviation is not None:
            self.deviation.labels(run, self.device_label(entry.device_type)).observe(entry.deviation)
        for direction, num_bytes in (("up", entry.bytes_up), ("down", entry.bytes_down)):
            self.bytes_sent.labels(run, direction).inc(num_bytes)
            self.bytes_saved.labels(run, direction).inc(max(0, model_bytes - num_bytes))
        if not self.labelled(run, entry.client):
            return
        labels = (run, entry.client)
        end, front = entry.window or (0, 0)
        if entry.deviation is not None:
            self.client_deviation.labels(*labels).set(entry.deviation)
            over = self.client_over_budget.labels(*labels)
            over.inc() if entry.deviation > OVER_BUDGET_RATIO else over.set(0)
        self.client_slowness.labels(*labels).set(entry.slowness)
        self.client_planned.labels(*labels).set(entry.predicted_seconds)
        self.client_measured.labels(*labels).set(entry.train_seconds)
        self.client_end.labels(*labels).set(end)
        self.client_front.labels(*labels).set(front)
        self.client_resets.labels(*labels).set(entry.resets)
        self.client_selected.labels(*labels).set(entry.num_selected)
        self.client_memory.labels(*labels).set(entry.peak_memory_bytes)
        self.bytes_up.labels(*labels).inc(entry.bytes_up)
        self.bytes_down.labels(*labels).inc(entry.bytes_down)
        device = entry.device
        if device.power_watts is not None:
            self.client_power.labels(*labels).set(device.power_watts)
        if device.energy_joules is not None:
            self.client_energy.labels(*labels).inc(device.energy_joules)
        if device.temperature_celsius is not None:
            self.client_temperature.labels(*labels).set(device.temperature_celsius)

    def observe_evaluation(self, run: str, accuracy: float, loss: float) -> None:
        self.accuracy.labels(run).set(accuracy)
        self.test_loss.labels(run).set(loss)

    def observe_own_tests(self, run: str, tests: ClientTests) -> None:
        spread = tests.overall
        for statistic, value in (
            ("mean", spread.mean_accuracy),
            ("weighted", spread.weighted_accuracy),
            ("worst", spread.worst_accuracy),
            ("deviation", spread.deviation),
        ):
            self.own_accuracy.labels(run, statistic).set(value)
        for device_type, each in tests.by_device_type.items():
            self.own_type_accuracy.labels(run, self.device_label(device_type)).set(each.mean_accuracy)


class AggregatorMetrics:
    """What the aggregator knows about updates and the model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.uploads = counter("fedel_uploads_total", "Uploads, by outcome", "outcome")
        for outcome in UPLOAD_OUTCOMES:
            self.uploads.labels(outcome)
        self.refused = counter("fedel_uploads_refused_total", "Uploads refused, by reason", "reason")
        for reason in REFUSALS:
            self.refused.labels(reason)
        self.upload_bytes = counter("fedel_upload_bytes_total", "Bytes of updates received")
        self.download_bytes = counter("fedel_download_bytes_total", "Bytes of models sent")
        self.folding = Histogram(
            "fedel_fold_seconds",
            "Seconds to fold one update (to add it to the mean)",
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
            registry=registry,
        )
        self.committing = Histogram(
            "fedel_commit_seconds",
            "Seconds to compute and write a new model version",
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 30),
            registry=registry,
        )
        self.version = Gauge("fedel_model_version", "Newest model version", ["run"], registry=registry)
        self.permits = Gauge("fedel_upload_permits_in_use", "Uploads in progress", registry=registry)
        self.waiting = Gauge("fedel_uploads_waiting", "Uploads waiting for a permit", registry=registry)
        self.disk_free = Gauge(
            "fedel_disk_free_bytes", "Free bytes on the file system with models and journals", registry=registry
        )
        self.disk_size = Gauge(
            "fedel_disk_size_bytes", "Size of the file system with models and journals", registry=registry
        )


class AgentMetrics:
    """What an agent exports on its own port, for devices that can be scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tasks = Counter("fedel_agent_tasks_total", "Tasks, by outcome", ["outcome"], registry=registry)
        self.connected = Gauge("fedel_agent_connected", "1 while a session is open", registry=registry)
        self.train_seconds = Gauge(
            "fedel_agent_train_seconds", "Training seconds of the last task", registry=registry
        )
        self.deviation = Gauge(
            "fedel_agent_budget_deviation_ratio",
            "Time of the last task that counts against T_th, divided by T_th, minus one",
            registry=registry,
        )
        self.reconnects = Counter("fedel_agent_reconnects_total", "Sessions that broke", registry=registry)

    def observe(self, train_seconds: float, budget_seconds: float) -> None:
        """Update the metrics from one finished task."""
        self.train_seconds.set(train_seconds)
        if train_seconds and budget_seconds:
            self.deviation.set(train_seconds / budget_seconds - 1)
