"""The device itself: disk, memory, torch and its GPU, data set, the time of a step. Torch is imported late."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fedel.errors import FedelError
from fedel.job import RunConfig
from fedel.types import LocalWork
from fedel_edge.config import AgentConfig
from fedel_edge.preflight.findings import Finding, bad, gigabytes, good, skipped

if TYPE_CHECKING:
    from fedel.data import Dataset
    from fedel.models import BlockModel
    from fedel.types import Array

LEAST_DISK_BYTES = 2e9
"""For a few models, a stored update and profiles."""
LEAST_MEMORY_BYTES = 1.5e9
"""Torch itself takes a third of it, and with CUDA twice as much."""
_STEPS = 5
_NOISE: tuple[str, dict[str, float], tuple[int, ...]] = ("vgg16", {"width": 0.25}, (3, 32, 32))
"""The model and input shape that are timed without a job."""


def disk(config: AgentConfig) -> Finding:
    """Free space for the agent's state, and permission to write it."""
    folder = config.state_dir.absolute()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free < LEAST_DISK_BYTES:
        remedy = f"free some, or set state_dir to a disk with {gigabytes(LEAST_DISK_BYTES)} or more"
        return bad("disk", f"{gigabytes(free)} free at {there}", remedy)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
    except OSError as error:
        remedy = f"give it to the agent's user (chown), or set state_dir; this check ran as uid {os.getuid()}"
        return bad("disk", f"{there}: {error.strerror}", remedy)
    return good("disk", f"{gigabytes(free)} free at {there}")


def memory(root: Path = Path("/")) -> Finding:
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return skipped("memory", "this system does not report it")
    total, free = (
        float(found[1]) * 1024 if (found := re.search(rf"^{word}:\s+(\d+) kB", text, re.MULTILINE)) else 0.0
        for word in ("MemTotal", "MemAvailable")
    )
    said = f"{gigabytes(free)} of {gigabytes(total)} free"
    if free < LEAST_MEMORY_BYTES:
        remedy = "end other programs (a Jetson's desktop: `systemctl isolate multi-user.target`), or add swap"
        return bad("memory", said, remedy)
    return good("memory", said)


def torch_there(config: AgentConfig) -> Finding:
    """Torch, and the device that it will train on."""
    try:
        import torch
    except ImportError as error:
        remedy = "pip install 'fedel[edge]'; on a Jetson NVIDIA's wheel for its JetPack (docs/jetson.md)"
        return bad("torch", f"cannot be imported: {error}", remedy)
    try:
        device = torch.device(config.device)
    except RuntimeError:
        return bad(
            "torch", f"device = {config.device!r}: torch does not know this device", 'write "cpu" or "cuda"'
        )
    said = f"torch {torch.__version__}, "
    if device.type == "cpu":
        idle = '; a GPU is there too (device = "cuda")' if torch.cuda.is_available() else ""
        return good("torch", f"{said}{config.threads or torch.get_num_threads()} CPU threads{idle}")
    if device.type != "cuda":
        return skipped("torch", f"{said}{device}: not checked; FedEL is tested on cpu and cuda")
    if not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else "finds no GPU"
        remedy = "install a build for this GPU (docs/jetson.md), check /dev/nv* and its group, or train on cpu"
        return bad("torch", f"device = {config.device!r}, but torch {torch.__version__} {why}", remedy)
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        return bad(
            "torch", f"device = {config.device!r}, but there are {count} GPUs", 'the first one is "cuda:0"'
        )
    return good("torch", f"{said}CUDA {torch.version.cuda}, {torch.cuda.get_device_name(device)}")


def data_set(config: AgentConfig, job: RunConfig | None) -> tuple[Finding, Dataset | None]:
    """The job's data set and this client's part of it; without a job, the data sets that are here."""
    from fedel.data.files import data_root
    from fedel.data.registry import ENTRIES
    from fedel.data.store import is_present

    root = data_root(config.data.root or None)
    if job is None:
        there = [name for name in ENTRIES if is_present(name, root)]
        if there:
            return good("data set", f"{', '.join(there)} in {root}"), None
        remedy = "--job JOB.toml checks what that job needs; `fedel data get NAME` downloads a data set"
        return skipped("data set", f"none in {root}", remedy), None
    from fedel.training.factory import make_data, part_of

    try:
        data = make_data(job, config.data.root)
        part = part_of(data, config.data)
    except FedelError as error:
        remedy = f"data sets belong in {root} (data.root): put it there with --root, as the agent's user"
        return bad("data set", str(error), remedy), None
    said = f"{data.name}: {len(part)} of {len(data.train)} training samples are this client's"
    return good("data set", said), data


def one_step(config: AgentConfig, job: RunConfig | None, data: Dataset | None) -> Finding:
    """How long a full training step takes, median of a few."""
    try:
        seconds, what = _timed_steps(config, job, data)
    except (FedelError, RuntimeError) as error:
        remedy = "out of memory: use a smaller batch or model; CUDA: does the torch build fit the driver?"
        return bad("one step", f"it fails: {str(error).splitlines()[0]}", remedy)
    return good("one step", f"{seconds:.3f} s for {what}")


def _timed_steps(config: AgentConfig, job: RunConfig | None, data: Dataset | None) -> tuple[float, str]:
    import torch

    from fedel.training import optim
    from fedel.training.clock import timed
    from fedel.training.objective import objective

    if config.threads:
        torch.set_num_threads(config.threads)
    device, work = torch.device(config.device), job.work if job else LocalWork()
    model, inputs, targets = _noise(work) if job is None or data is None else _of_job(job, data)
    model.to(device).train()
    x, y = torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)
    optimiser = optim.build([p for p in model.parameters() if p.requires_grad], work)

    def step() -> None:
        optimiser.zero_grad()
        objective([model(x)], y)[0].backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    step()
    seconds = statistics.median(timed(device, step) for _ in range(_STEPS))
    return seconds, f"{len(y)} samples of {model.spec.name}" + ("" if job else " on noise (--job: your own)")


def _noise(work: LocalWork) -> tuple[BlockModel, Array, Array]:
    import numpy as np
    import torch

    from fedel.models import build

    name, options, shape = _NOISE
    rng = np.random.default_rng(0)
    x = rng.standard_normal((work.batch_size, *shape), dtype=np.float32)
    model = build(name, sample_input=torch.from_numpy(x[:2]), num_classes=10, **options)
    return model, x, rng.integers(10, size=len(x))


def _of_job(job: RunConfig, data: Dataset) -> tuple[BlockModel, Array, Array]:
    import numpy as np

    from fedel.training.factory import make_model

    rng = np.random.default_rng(0)
    x, y = data.train_batch(np.resize(np.arange(len(data.train)), job.work.batch_size), rng)
    return make_model(job, data), x, y
