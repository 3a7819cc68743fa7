"""``fedel profile``: how long each part of a training step takes on this device."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedel.core.timing import full_step
from fedel.data.dataset import IGNORE
from fedel.data.load import load_data
from fedel.errors import ConfigError
from fedel.training.profile_io import save_profile, to_json
from fedel.types import Array, LocalWork, ModelSpec, TimingProfile

if TYPE_CHECKING:
    import torch

    from fedel.models.blocks import BlockModel

_EXAMPLE = """example:
  fedel profile --model vgg16 --width 0.25 --batch-size 32 --out vgg16.json
  fedel profile --model resnet50 --data speech-commands --device cuda --out orin.json
  fedel profile --model examples.own:model --input 1,16,16 --widths 0.5,0.25"""
_DEFAULT_SHAPES = {"vgg16": (3, 32, 32), "resnet50": (1, 32, 32), "cnn": (1, 28, 28), "albert": (64,)}
_MOST_ROWS = 40
"""Longer tables show one row per block."""
_AGREE = (0.6, 1.4)
"""Outside this range of (whole step) / (sum of parts) the measurement is not reliable."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "profile",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        default="vgg16",
        metavar="NAME",
        help="vgg16, resnet50, albert, cnn or package.module:function",
    )
    add("--width", type=float, default=1.0, help="share of the model's channels (default 1)")
    add(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the model; may be repeated",
    )
    add("--classes", type=int, help="number of classes (default: the model's own, or the data's)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input", type=_numbers(int), metavar="C,H,W", help="shape of one sample (random values)"
    )
    source.add_argument("--data", metavar="NAME", help="a data set; the time to load a batch counts too")
    add("--batch-size", type=int, default=32)
    add("--optimiser", choices=("sgd", "adamw"), default="sgd")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default cpu)")
    add("--threads", type=int, help="CPU threads (default: chosen by torch)")
    add("--widths", type=_numbers(float), default=(), metavar="W,W", help="also time these narrowed models")
    add("--rounds", type=int, default=15, help="repetitions; the median is used (default 15)")
    add("--tensors", action="store_true", help="one row per tensor, even if there are many")
    add("--out", type=Path, metavar="FILE.json", help="save the profile")
    add("--json", action="store_true", help="print the profile as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch  # takes seconds to import

    from fedel.training.profiler import profile

    if args.threads:
        torch.set_num_threads(args.threads)
    model, batch, fetch = _workload(args)
    work = LocalWork(batch_size=args.batch_size, optimiser=args.optimiser)
    with _progress(quiet=args.json) as report:
        measured = profile(
            model,
            batch,
            work,
            _device(args.device),
            widths=args.widths,
            rounds=args.rounds,
            fetch=fetch,
            progress=report,
        )
    if args.out:
        save_profile(measured, args.out)
    if args.json:
        print(to_json(measured))
        return 0
    console = Console()
    console.print(table_of(measured, model.spec, args.tensors))
    console.print(summary_of(measured))
    if args.out:
        console.print(f"saved in {args.out}")
    return 0


def table_of(measured: TimingProfile, spec: ModelSpec, every_tensor: bool = False) -> Table:
    """One row per tensor, or per block if there are too many tensors."""
    by_tensor = every_tensor or len(measured.tensors) <= _MOST_ROWS
    table = Table(
        title=f"{measured.model} on {measured.device}, batch {measured.batch_size}: ms per step", pad_edge=False
    )
    table.add_column("block")
    table.add_column("tensor" if by_tensor else "tensors")
    for title in ("grad", "update", "forward", "exit"):
        table.add_column(title, justify="right")
    for number, (name, block) in enumerate(zip(spec.block_names, measured.blocks, strict=True), start=1):
        inside = [t for t in measured.tensors if t.block == number]
        times = [(t.name.split(".", 2)[-1], t.grad_seconds, t.update_seconds) for t in inside]
        if not by_tensor:
            times = [(str(len(inside)), sum(t[1] for t in times), sum(t[2] for t in times))]
        exit_seconds = block.exit_forward_seconds + block.exit_backward_seconds
        for place, (label, grad, update) in enumerate(times):
            first = (
                (f"{number} {name}", _ms(block.forward_seconds), _ms(exit_seconds)) if place == 0 else ("",) * 3
            )
            table.add_row(first[0], label, _ms(grad), _ms(update), *first[1:])
    sums = (
        sum(t.grad_seconds for t in measured.tensors),
        sum(t.update_seconds for t in measured.tensors),
        sum(b.forward_seconds for b in measured.blocks),
    )
    table.add_section()
    table.add_row("sum", str(len(measured.tensors)), *map(_ms, sums), "")
    return table


def summary_of(measured: TimingProfile) -> str:
    cost = full_step(measured)
    whole = cost.total("train")
    lines = [
        f"whole step {_ms(whole)} ms: forward {_ms(cost.forward_seconds)} ({cost.forward_seconds / whole:.0%}, "
        f"overhead {_ms(measured.overhead_seconds)} in it), backward {_ms(cost.backward_seconds)}; "
        f"calibration {measured.calibration:.3f}"
    ]
    for w in measured.widths:
        lines.append(
            f"width {w.width:g}: forward {_ms(w.forward_seconds)}, backward {_ms(w.backward_seconds)} ms"
        )
    if not _AGREE[0] <= measured.calibration <= _AGREE[1]:
        lines.append(
            "the parts do not add up to the whole step: is the machine busy? Stop other programs, "
            "or try --threads 1 or --rounds 50"
        )
    return "\n".join(lines)


def _workload(args: argparse.Namespace) -> tuple[BlockModel, tuple[Array, Array], Callable[[], object] | None]:
    import torch

    from fedel.models.registry import build

    options = dict(map(_option, args.option))
    if args.width != 1:
        options["width"] = args.width
    rng = np.random.default_rng(0)
    if args.data:
        data = load_data(args.data)
        rows = rng.integers(0, len(data.train), args.batch_size)
        batch = data.train_batch(rows, rng)
        options.setdefault("num_classes", data.num_classes)
        model = build(args.model, sample_input=torch.from_numpy(batch[0]), **options)
        return model, batch, lambda: data.train_batch(rows, rng)
    shape = args.input or _DEFAULT_SHAPES.get(args.model)
    if shape is None:
        raise ConfigError(
            f"the input shape of {args.model} is not known: add --input C,H,W (one sample) or --data NAME"
        )
    if args.classes:
        options["num_classes"] = args.classes
    sample = rng.standard_normal((args.batch_size, *shape)).astype(np.float32)
    if args.model == "albert":
        model = build(args.model, **options)
        return model, _tokens(model, (args.batch_size, *shape), rng), None
    model = build(args.model, sample_input=torch.from_numpy(sample), **options)
    return model, (sample, rng.integers(0, model.num_classes, args.batch_size)), None


def _tokens(model: BlockModel, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Array, Array]:
    """Random tokens, 15 % of them masked."""
    x = rng.integers(0, model.num_classes, shape)
    return x, np.where(rng.random(shape) < 0.15, x, IGNORE)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("measuring", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text}: write it as KEY=VALUE, e.g. --option batch_norm=true")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _numbers(kind: type[int] | type[float]) -> Callable[[str], tuple[float, ...]]:
    def parse(text: str) -> tuple[float, ...]:
        return tuple(kind(part) for part in text.split(","))

    parse.__name__ = "list of numbers"
    return parse


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is not a device of torch; use cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {name}: torch finds no CUDA device; use --device cpu, or install a CUDA build of torch"
        )
    return device


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
