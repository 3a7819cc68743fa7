"""Runs that were never done: directories with the figures a test wants to see analysed."""

from fedel import config
from fedel.experiments.scale import Power, Scale, Task
from tests.report.fakes import client_record, result, round_record

JOB = {
    "scope": "backward",
    "rounds": {"num_rounds": 4},
    "work": {"num_steps": 10},
    "fleet": {"counts": {"orin": 1, "xavier": 1}},
}


def scale(**changes):
    settings = {
        "note": "Nothing was trained for this.",
        "tasks": {"cifar10": Task("pictures", JOB, seeds=2)},
        "power": {"orin": Power(20, 5), "xavier": Power(10, 5)},
        "name": "made-up",
    }
    return Scale(**{**settings, **changes})


def write(run, place, accuracies, seconds=1.0, budget=0.1, losses=None, o1=1.0, selected=("a",)):
    """Every round takes ``seconds``; the Orin trains for half of them. T_th of a round is ten budgets."""
    folder = place / run.name
    folder.mkdir(parents=True)
    records = [
        round_record(
            round=number,
            latency_seconds=seconds,
            clock_seconds={"backward": seconds, "train": 2 * seconds},
            scope=run.table["scope"],
            accuracy=accuracy,
            test_loss=losses[number] if losses else 1.0,
            o1=o1,
            clients=(
                entry("client-0", "orin", seconds / 2, budget, ("a", "b")),
                entry("client-1", "xavier", seconds, budget, selected),
            ),
        )
        for number, accuracy in enumerate(accuracies)
    ]
    (folder / "config.toml").write_text(config.write(run.table))
    (folder / "rounds.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    found = result(rounds=len(records), accuracy=accuracies[-1])
    (folder / "result.json").write_text(found.to_json())


def entry(client, device, seconds, budget, selected):
    return client_record(
        client=client,
        device_type=device,
        window=(1, 2),
        selected=tuple(selected),
        num_selected=len(selected),
        budget_seconds=10 * budget,
        train_seconds=seconds,
        deviation=seconds / (10 * budget) - 1,
        predicted_deviation=0.9 * seconds / (10 * budget) - 1,
        clock_seconds={"backward": seconds, "train": 2 * seconds},
    )
