"""Records that nobody measured: plain values, of which a test changes those that it looks at."""

from typing import Any

from fedel.records import ClientRecord, RoundRecord, RunResult

_CLIENT: dict[str, Any] = {
    "client": "one",
    "window": None,
    "resets": 0,
    "num_selected": 2,
    "selected": ("a", "b"),
    "num_steps": 10,
    "num_samples": 100,
    "loss": 1.0,
    "budget_seconds": 1.0,
    "predicted_seconds": 1.0,
    "predicted_forward_seconds": 0.25,
    "predicted_backward_seconds": 0.75,
    "train_seconds": 1.0,
    "deviation": 0.0,
    "predicted_deviation": 0.0,
    "over_budget": False,
    "peak_memory_bytes": 0,
}
_ROUND: dict[str, Any] = {
    "round": 0,
    "strategy": "fedel",
    "budget_seconds": 0.1,
    "num_tasks": 1,
    "num_updates": 1,
    "loss": 1.0,
    "o1": 0.0,
    "clients": (),
}
_RESULT: dict[str, Any] = {
    "run": "night",
    "phase": "finished",
    "strategy": "fedel",
    "seed": 3,
    "rounds": 1,
    "accuracy": None,
    "test_loss": None,
    "best_accuracy": None,
    "best_round": None,
    "wall_seconds": 8.0,
    "virtual_seconds": None,
    "bytes_up": 0,
    "bytes_down": 0,
    "clients": {},
    "tensors": ("a", "b"),
    "versions": {},
}


def client_record(**changes: Any) -> ClientRecord:
    return ClientRecord(**(_CLIENT | changes))


def round_record(**changes: Any) -> RoundRecord:
    return RoundRecord(**(_ROUND | changes))


def result(**changes: Any) -> RunResult:
    return RunResult(**(_RESULT | changes))
