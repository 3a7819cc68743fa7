"""What keeping the outputs of the frozen blocks saves, and what it costs. Prints Markdown.

    python -m benchmarks.prefix_cache --model vgg16 --width 0.5

Trains windows for 1, 2 and 5 passes over the data: without a cache, with room for half of the samples, and
with room for all. Each in a new process, in which freed memory goes back to the system at once, so that the
peak is what was in use. Seconds are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.elastic_step import CHANNELS, GIVE_BACK, NOTHING, noise, warm_up, window_job
from fedel.core.prefix import frozen_steps
from fedel.models.blocks import BlockModel
from fedel.models.registry import build
from fedel.training.trainer import TorchTrainer
from fedel.types import LocalWork, Patch

PASSES = (1, 2, 5)
SHARES = (0.0, 0.5, 1.0)


def sample_bytes(model: BlockModel, block: int) -> int:
    """Output of a block for one sample, and its label."""
    x = torch.zeros(2, CHANNELS[model.spec.name], 32, 32)
    with torch.no_grad():
        return model.eval().run(x, 1, block)[0].nbytes + 8


def one(args: argparse.Namespace) -> dict[str, Any]:
    """Train once, here."""
    torch.manual_seed(0)
    model = build(args.model, width=args.width)
    data = noise(model, CHANNELS[args.model], args.samples)
    num_steps = args.passes * (args.samples // args.batch_size)
    work = LocalWork(num_steps=num_steps, batch_size=args.batch_size, lr=1e-4)
    trainer = TorchTrainer(model, data, np.arange(args.samples), NOTHING)
    end, front = map(int, args.blocks.split("-"))
    room = int(args.share * args.samples) * sample_bytes(model, end - 1)
    start = model.tensors()
    warm_up()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    trained = trainer.train(start, replace(window_job(model, work, end, front), prefix_cache_bytes=room))
    return {
        "seconds": trained.seconds / num_steps,
        "peak": trained.peak_memory_bytes - before,
        "paid": frozen_steps(work, args.samples, num_steps, sample_bytes(model, end - 1), room) / num_steps,
        "bits": digest(trained.patches),
    }


def digest(patches: dict[str, Patch] | Any) -> str:
    return hashlib.sha256(b"".join(patches[name].values.tobytes() for name in sorted(patches))).hexdigest()


def in_a_process(passes: int, share: float, blocks: str) -> dict[str, Any]:
    options = ["--passes", str(passes), "--share", str(share), "--blocks", blocks]
    command = [sys.executable, "-m", "benchmarks.prefix_cache", "--one", *sys.argv[1:], *options]
    environment = {**os.environ, **GIVE_BACK}
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vgg16", choices=sorted(CHANNELS))
    parser.add_argument("--width", type=float, default=0.5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--passes", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(json.dumps(one(args)))
        return
    last = build(args.model, width=args.width).spec.num_blocks
    third = round(last / 3)
    print("| window | passes | room for | steps that pay | ms per step | share | peak MB | same bits |")
    print("|---|---|---|---|---|---|---|---|")
    for blocks in (f"{third + 1}-{last - third}", f"{last - third + 1}-{last}"):
        for passes in PASSES:
            found = {share: in_a_process(passes, share, blocks) for share in SHARES}
            for share, each in found.items():
                print(
                    f"| {blocks} | {passes} | {share:.0%} | {each['paid']:.0%} | {each['seconds'] * 1e3:.0f} "
                    f"| {each['seconds'] / found[0.0]['seconds']:.2f} | {each['peak'] / 1e6:.0f} "
                    f"| {'yes' if each['bits'] == found[0.0]['bits'] else 'NO'} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
