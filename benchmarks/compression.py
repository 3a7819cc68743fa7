"""What each compression of ``[upload]`` does to accuracy and bytes: the tables of docs/compression.md.

    python -m benchmarks.compression
    python -m benchmarks.compression --up-mbit 20
    python -m benchmarks.compression --cost

Simulates FedEL and FedAvg on the digits that come with scikit-learn. All compressions of a seed share the split
of the data, the devices and the participants of every round. With ``--up-mbit`` the uplink is slow, transfers
count, and all runs of a seed have the same virtual time: that of ``--rounds`` rounds of FedAvg without
compression. ``--cost`` times one large update.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedel.core.compression import compress_update, restored
from fedel.records import RoundRecord
from fedel.roles.aggregator import RoundFold
from fedel.simulation.job import SimulationConfig
from fedel.simulation.start import play_all, session
from fedel.strategies import build
from fedel.types import ModelSpec, Patch, Report, TensorSpec, Update, UploadSettings
from fedel.wire.payload import pack

NUM_CLIENTS, NUM_PARTICIPANTS = 20, 10
JOB: dict[str, Any] = {
    "workload": {"model": "cnn", "data": "digits"},
    "work": {"num_steps": 10, "batch_size": 16, "lr": 0.02},
    "partition": {"method": "dirichlet", "num_clients": NUM_CLIENTS, "alpha": 0.5},
    "fleet": {"base": "measured", "random": ["orin", "orin/2", "orin/3", "orin/4"]},
}
UPLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"compression": "fp16"},
    "int8": {"compression": "int8"},
    "topk, share = 0.1": {"compression": "topk", "share": 0.1},
    "topk, share = 0.01": {"compression": "topk", "share": 0.01},
}


MAX_ROUNDS = 1000
"""Enough for any virtual time."""
DOWN_MBIT = 50.0


def play(
    method: str,
    upload: dict[str, Any],
    rounds: dict[str, Any],
    seed: int,
    profile: Path,
    up_mbit: float = 0.0,
) -> list[RoundRecord]:
    """The rounds of one run. The timings of the base device are measured once, for the first run."""
    rounds = {"num_participants": NUM_PARTICIPANTS, **rounds}
    table = {**JOB, "seed": seed, "strategy": {"name": method}, "rounds": rounds, "upload": upload}
    if up_mbit:
        link = {"up_mbps": up_mbit, "down_mbps": DOWN_MBIT}
        table |= {"network": link, "scope": "round"}
    records: list[RoundRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if profile.exists():
            run.mkdir()
            (run / profile.name).write_bytes(profile.read_bytes())
        with session(SimulationConfig.parse(table), run, executor="serial") as ready:
            play_all(ready, records.append)
        profile.write_bytes((run / profile.name).read_bytes())
    return records


def same_time(methods: list[str], only: list[str], num_rounds: int, seeds: list[int], up_mbit: float) -> None:
    """Accuracy after the same virtual seconds over a slow uplink."""
    _say("method", "compression", "accuracy", "rounds", "seconds per round", "kB up per client and round")
    _say(*["---"] * 6)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        plain = {"num_rounds": num_rounds, "evaluate_every": 0}
        first = [play("fedavg", {}, plain, seed, profile, up_mbit) for seed in seeds]
        limits = [sum(record.latency_seconds for record in records) for records in first]
        for method in methods:
            for name in only:
                runs = []
                for seed, limit in zip(seeds, limits, strict=True):
                    rounds = {"num_rounds": MAX_ROUNDS, "max_seconds": limit, "evaluate_every": MAX_ROUNDS}
                    runs.append(play(method, UPLOADS[name], rounds, seed, profile, up_mbit))
                seconds = np.mean([record.latency_seconds for records in runs for record in records])
                counts = ", ".join(str(len(records)) for records in runs)
                _say(method, name, _accuracy(runs), counts, f"{seconds:.3f}", _kilobytes(runs))


def cost() -> None:
    """Seconds of one core, the best of three, for an update of seven layers of VGG16: 66 MB."""
    rng = np.random.default_rng(1)
    layers = tuple(TensorSpec(f"layer {number}", 1, (512, 512, 3, 3)) for number in range(7))
    spec = ModelSpec("large", ("one",), layers)
    model = {t.name: rng.normal(0, 0.1, t.shape).astype(np.float32) for t in layers}
    change = {t.name: rng.normal(0, 1e-3, t.shape).astype(np.float32) for t in layers}
    patches = {name: Patch(values + change[name]) for name, values in model.items()}
    update = Update(patches, Report("client", 0, 1, 1, 1.0, 0.0))
    _say("compression", "MB", "seconds to compress", "seconds to restore and fold")
    _say(*["---"] * 4)
    for name, table in UPLOADS.items():
        upload, compressing, folding = UploadSettings(**table), [], []
        for _ in range(3):
            begin = time.process_time()
            sent, _ = compress_update(upload, spec, update, model, change)
            compressing.append(time.process_time() - begin)
            fold = RoundFold(build({"name": "fedel"}), spec)
            begin = time.process_time()
            fold.add(restored(upload, sent, model))
            folding.append(time.process_time() - begin)
        size = pack(sent.patches).num_bytes / 1e6
        _say(name, f"{size:.1f}", f"{min(compressing):.2f}", f"{min(folding):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedel"])
    parser.add_argument("--only", nargs="+", default=list(UPLOADS))
    parser.add_argument("--up-mbit", type=float, default=0.0, help="compare at the same time, over this uplink")
    parser.add_argument("--cost", action="store_true", help="measure the codec instead")
    arguments = parser.parse_args()
    if arguments.cost:
        return cost()
    if arguments.up_mbit:
        chosen = arguments.methods, arguments.only, arguments.rounds, arguments.seeds, arguments.up_mbit
        return same_time(*chosen)
    half, end = arguments.rounds // 2, arguments.rounds
    _say("method", "compression", f"after {half} rounds", f"after {end} rounds", "kB up per client and round")
    _say(*["---"] * 5)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        for method in arguments.methods:
            for name in arguments.only:
                rounds = {"num_rounds": end, "evaluate_every": half}
                runs = [play(method, UPLOADS[name], rounds, seed, profile) for seed in arguments.seeds]
                _say(method, name, _accuracy(runs, half), _accuracy(runs, end), _kilobytes(runs))
    return None


def _accuracy(runs: list[list[RoundRecord]], num_rounds: int = 0) -> str:
    """After this many rounds, or after the last."""
    each = [100 * (records[num_rounds - 1].accuracy or 0.0) for records in runs]
    return f"{np.mean(each):.1f} % ({', '.join(f'{accuracy:.1f}' for accuracy in each)})"


def _kilobytes(runs: list[list[RoundRecord]]) -> str:
    sent = [record.bytes_up / record.num_updates for records in runs for record in records]
    return f"{np.mean(sent) / 1e3:.1f}"


def _say(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
