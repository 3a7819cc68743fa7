"""The numbers of a round that trackers draw: TensorBoard, MLflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fedel.records import ClientRecord, RoundRecord

_OF_ROUND: Mapping[str, Callable[[RoundRecord], float | None]] = {
    "model/accuracy": lambda r: r.accuracy,
    "model/test_loss": lambda r: r.test_loss,
    "model/train_loss": lambda r: r.loss,
    "clients/mean_accuracy": lambda r: r.own.mean_accuracy if r.own else None,
    "clients/weighted_accuracy": lambda r: r.own.weighted_accuracy if r.own else None,
    "clients/worst_accuracy": lambda r: r.own.worst_accuracy if r.own else None,
    "clients/deviation": lambda r: r.own.deviation if r.own else None,
    "round/latency_seconds": lambda r: r.latency_seconds,
    "round/num_updates": lambda r: r.num_updates,
    "round/bytes_up": lambda r: r.bytes_up,
    "round/bytes_down": lambda r: r.bytes_down,
    "round/o1": lambda r: r.o1,
    "round/budget_seconds": lambda r: r.budget_seconds,
}
_OF_CLIENTS: Mapping[str, Callable[[ClientRecord], float | None]] = {
    "deviation": lambda r: r.deviation,
    "train_seconds": lambda r: r.train_seconds,
    "selected_tensors": lambda r: r.num_selected,
}


def of_round(record: RoundRecord) -> Iterator[tuple[str, float]]:
    """Tags and numbers of the round as a whole; values that were not measured are left out."""
    for tag, figure in _OF_ROUND.items():
        if (value := figure(record)) is not None:
            yield tag, value
    for phase, seconds in record.phases.items():
        yield f"phase_seconds/{phase}", seconds


def of_clients(record: RoundRecord) -> Iterator[tuple[str, float]]:
    for entry in record.clients:
        for tag, figure in _OF_CLIENTS.items():
            if (value := figure(entry)) is not None:
                yield f"client_{tag}/{entry.client}", value
        for edge, block in zip(("end", "front"), entry.window or (), strict=False):
            yield f"client_window_{edge}/{entry.client}", block
