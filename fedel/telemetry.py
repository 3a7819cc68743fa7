"""Every metric FedEL exports, declared here once. Each class takes a registry, so that tests bring their own.

Agents sit behind routers and cannot be scraped: what they know reaches Prometheus through the coordinator.
"""

from __future__ import annotations

import math
import platform

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.metrics import MetricWrapperBase

from fedel import __version__
from fedel.records import ClientRecord, RoundRecord

MAX_CLIENTS = 1000
"""Clients with a time series of their own; beyond them the histograms by device type speak alone."""
MAX_TENSORS = 1000
PHASES = ("wait", "download", "train", "upload", "fold", "commit", "evaluate")
OVER_BUDGET_RATIO = 0.2
"""A round that took a client longer than T_th by more than this counts as over budget."""
UPLOAD_OUTCOMES = ("accepted", "duplicate", "refused", "broken")
MESSAGE_REFUSALS = ("superseded", "unknown_run", "join", "done")
"""What a coordinator does not take: a client's second session, another model, a report of another's task."""
ACCESS_REFUSALS = ("certificate", "expired", "revoked", "role", "client", "token")
"""Why a call is not let in: no identity, a certificate that is good no more, no right, another's name."""
REFUSALS = (
    *("checksum", "conflict", "digest", "disk", "dtype", "duplicate", "early", "header", "idle", "late"),
    *("missing", "not_finite", "range", "sealed", "shape", "size", "starting", "steps", "superseded"),
    *("unknown_run", "unknown_tensor", "unknown_version", "weight"),
)
"""Every reason of ``UpdateRefused``. Counters start at 0 for each: Prometheus sees no increase in a first 1."""

_LATENCY = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_DEVIATION = (-0.75, -0.5, -0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0)


def build_info(registry: CollectorRegistry, service: str) -> None:
    """Which version of which service this is."""
    info = Info("fedel_build", "Version of FedEL and of Python", registry=registry)
    info.info({"version": __version__, "service": service, "python": platform.python_version()})


class AccessMetrics:
    """Who was not let in, and until when others will talk to us; the same at every server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.refused = Counter(
            "fedel_calls_refused_total", "Calls not let in, by reason", ["reason"], registry=registry
        )
        for reason in ACCESS_REFUSALS:
            self.refused.labels(reason)
        self.certificate_expiry = Gauge(
            "fedel_certificate_expiry_timestamp_seconds",
            "Unix time at which the server's own certificate expires; 0 if it has none",
            registry=registry,
        )


class CoordinatorMetrics:
    """What the coordinator knows of rounds and of clients."""

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
            "fedel_round_last_latency_seconds", "The same, of the last round", "run"
        )
        self.round_phase = gauge(
            "fedel_round_phase_seconds",
            "Seconds of a phase in the last round; of phases on devices, the longest",
            "run",
            "phase",
        )
        self.rounds = counter("fedel_rounds_total", "Rounds closed, by outcome", "run", "outcome")
        self.round_number = gauge("fedel_round_number", "The open round, from 0", "run")
        self.round_started = gauge(
            "fedel_round_opened_timestamp_seconds",
            "Unix time at which the open round was opened; 0 if none",
            "run",
        )
        self.round_deadline = gauge("fedel_round_deadline_seconds", "Seconds after which it may close", "run")
        self.run_active = gauge("fedel_run_active", "1 while rounds go on", "run")
        self.budget = gauge("fedel_budget_seconds", "T_th of one training step", "run")

        self.deviation = Histogram(
            "fedel_budget_deviation_ratio",
            "Training time over T_th, minus one, of every client and round",
            ["run", "device_type"],
            buckets=_DEVIATION,
            registry=registry,
        )
        per_client = ("run", "client")
        self.client_deviation = gauge(
            "fedel_client_budget_deviation_ratio", "Training time over T_th, minus one, last round", *per_client
        )
        self.client_over_budget = gauge(
            "fedel_client_over_budget_rounds",
            "Rounds in a row that took the client over 1.2 T_th, since the coordinator started",
            *per_client,
        )
        self.client_planned = gauge(
            "fedel_client_planned_seconds", "Training seconds predicted from the profile", *per_client
        )
        self.client_measured = gauge("fedel_client_train_seconds", "Training seconds measured", *per_client)
        self.client_front = gauge(
            "fedel_client_window_front_block", "Deep edge of the window; 0 if there is none", *per_client
        )
        self.client_end = gauge(
            "fedel_client_window_end_block", "Shallow edge of the window; 0 if there is none", *per_client
        )
        self.client_resets = gauge("fedel_client_window_resets", "Times the window started again", *per_client)
        self.client_selected = gauge("fedel_client_selected_tensors", "Tensors trained last round", *per_client)
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
            "Unix time at which the client was last heard",
            *per_client,
        )
        self.bytes_up = counter("fedel_client_upload_bytes_total", "Bytes clients sent", *per_client)
        self.bytes_down = counter("fedel_client_download_bytes_total", "Bytes clients received", *per_client)
        self.bytes_sent = counter(
            "fedel_bytes_sent_total", "Bytes that travelled, of every client", "run", "direction"
        )
        self.bytes_saved = counter(
            "fedel_bytes_saved_total", "Bytes that did not travel, against the full model", "run", "direction"
        )

        self.coverage = gauge(
            "fedel_tensor_clients", "Clients that trained the tensor last round", "run", "tensor"
        )
        self.untrained = gauge(
            "fedel_tensor_untrained_rounds", "Rounds since anybody trained the tensor", "run", "tensor"
        )
        self.accuracy = gauge("fedel_model_accuracy_ratio", "Test accuracy of the newest tested model", "run")
        self.test_loss = gauge("fedel_model_test_loss", "Test loss of the newest tested model", "run")
        self.train_loss = gauge("fedel_model_train_loss", "Mean training loss of the last round", "run")
        self.bias = gauge(
            "fedel_round_bias_o1", "O1 of the last round: bias from training unequal parts", "run"
        )
        self.diverged = gauge("fedel_model_not_finite", "1 if the last round's loss is NaN or infinite", "run")
        self.sessions = gauge("fedel_sessions", "Agents with an open session")
        self.heartbeats = counter("fedel_heartbeats_total", "Heartbeats received")
        self.tasks_failed = counter("fedel_tasks_failed_total", "Tasks an agent could not finish", "run")
        self.refused = counter("fedel_messages_refused_total", "Agents' messages refused, by reason", "reason")
        for reason in MESSAGE_REFUSALS:
            self.refused.labels(reason)
        self._by_run: list[MetricWrapperBase] = [
            metric
            for metric in vars(self).values()
            if isinstance(metric, MetricWrapperBase) and "run" in metric._labelnames
        ]
        self._labelled: dict[str, set[str]] = {}

    def labelled(self, run: str, client: str) -> bool:
        """Whether the client has time series of its own; the first thousand of a run do."""
        known = self._labelled.setdefault(run, set())
        if client not in known and len(known) < MAX_CLIENTS:
            known.add(client)
        return client in known

    def forget(self, run: str) -> None:
        """Drop every time series of a run: it is over, and the coordinator may live for years."""
        self._labelled.pop(run, None)
        for metric in self._by_run:
            metric.remove_by_labels({"run": run})

    def observe_round(self, run: str, record: RoundRecord, model_bytes: int) -> None:
        """Take over one line of ``rounds.jsonl``."""
        self.round_latency.labels(run).observe(record.latency_seconds)
        self.round_last_latency.labels(run).set(record.latency_seconds)
        self.rounds.labels(run, "closed" if record.num_updates >= record.num_tasks else "partial").inc()
        self.budget.labels(run).set(record.budget_seconds)
        self.bias.labels(run).set(record.o1)
        for phase, seconds in record.phases.items():
            self.round_phase.labels(run, phase).set(seconds)
        # A line that was read back holds null where the loss was NaN.
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
            self.deviation.labels(run, entry.device_type or "unknown").observe(entry.deviation)
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


class AggregatorMetrics:
    """What the aggregator knows of updates and of the model."""

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
            "Seconds to fold one update",
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
            registry=registry,
        )
        self.committing = Histogram(
            "fedel_commit_seconds",
            "Seconds to make and write a new version",
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 30),
            registry=registry,
        )
        self.version = Gauge("fedel_model_version", "Newest version of the model", ["run"], registry=registry)
        self.permits = Gauge("fedel_upload_permits_in_use", "Uploads under way", registry=registry)
        self.waiting = Gauge("fedel_uploads_waiting", "Uploads that wait for a permit", registry=registry)
        self.disk_free = Gauge(
            "fedel_disk_free_bytes", "Room left where models and journals lie", registry=registry
        )
        self.disk_size = Gauge("fedel_disk_size_bytes", "Size of that file system", registry=registry)


class AgentMetrics:
    """What an agent shows on its own port, for a device that can be scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tasks = Counter("fedel_agent_tasks_total", "Tasks, by outcome", ["outcome"], registry=registry)
        self.connected = Gauge("fedel_agent_connected", "1 while a session is open", registry=registry)
        self.train_seconds = Gauge(
            "fedel_agent_train_seconds", "Training seconds, last task", registry=registry
        )
        self.deviation = Gauge(
            "fedel_agent_budget_deviation_ratio",
            "Training time over T_th, minus one, last task",
            registry=registry,
        )
        self.reconnects = Counter("fedel_agent_reconnects_total", "Sessions that broke", registry=registry)

    def observe(self, train_seconds: float, budget_seconds: float) -> None:
        """Take over one task that is done."""
        self.train_seconds.set(train_seconds)
        if train_seconds and budget_seconds:
            self.deviation.set(train_seconds / budget_seconds - 1)
