"""Torch behind the Trainer port: local training and the importance probe (paper, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedel.data.dataset import Dataset
from fedel.errors import DataError
from fedel.models.blocks import BlockModel
from fedel.seeds import generator
from fedel.training import optim
from fedel.training.batches import batch_stream
from fedel.training.clock import peak_memory_bytes, reset_peak_memory, seconds_between, stamp
from fedel.training.elastic import Elastic, elastic, useful_exits
from fedel.training.objective import objective
from fedel.training.sparse import masked_tensors, thresholded
from fedel.types import (
    Array,
    Job,
    LocalWork,
    ModelSpec,
    Patch,
    Role,
    Tensors,
    TimingProfile,
    Trained,
    Where,
    Window,
)

MAX_STATISTICS_BATCHES = 8
"""Batches over which the global model's statistics are measured with static batch norm."""


class TorchTrainer:
    """Trains one client's samples. Results depend on the arguments alone, never on earlier calls.

    The model is scratch space: trainers of one process may share it, one call at a time.
    """

    def __init__(
        self,
        model: BlockModel,
        data: Dataset,
        indices: Array,
        profile: TimingProfile,
        device: str | torch.device = "cpu",
    ) -> None:
        if len(indices) == 0:
            raise DataError(f"a client of {data.name} holds no samples; give each one, or use fewer clients")
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.data = data
        self.indices = np.asarray(indices)
        self._profile = profile

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def profile(self) -> TimingProfile:
        return self._profile

    @property
    def num_samples(self) -> int:
        return len(self.indices)

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Labels the client holds, sorted; none for text, where a label is a token."""
        if self.data.kind == "text":
            return ()
        return tuple(np.unique(self.data.train.y[self.indices]).tolist())

    @cached_property
    def _present(self) -> Tensor | None:
        if not self.classes:
            return None
        held = np.isin(np.arange(self.data.num_classes), self.classes)
        return torch.from_numpy(held).to(self.device)

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        """First-order loss change <g1, dw> of every weight in the window, by a trial step."""
        self.model.load(model)
        weights = [t.name for t in self.spec.weights_in(window.end, window.front)]
        exits = self.spec.exits_for(window.end, window.front)
        rng = generator(seed, "probe")
        x, y = self._batch(next(batch_stream(self.indices, work, rng)), rng)
        with (
            self._own_randomness(seed),
            elastic(self.model, weights, exits, window.end, track_statistics=False) as net,
        ):
            with torch.no_grad():
                h = self.model.run(x, 1, window.end - 1)
            parameters = list(net.trained.values())
            gradients = self._gradients(net, h, y, parameters)
            optim.clip(gradients, work.clip_norm)
            with torch.no_grad():
                start = [p.clone() for p in parameters]
                moves = [optim.first_step(p, g, work) for p, g in zip(parameters, gradients, strict=True)]
                for p, move in zip(parameters, moves, strict=True):
                    p.add_(move)
            after = self._gradients(net, h, y, parameters)
            with torch.no_grad():
                for p, value in zip(parameters, start, strict=True):
                    p.copy_(value)
            change = {
                name: float((g * move).sum(dtype=torch.float64))
                for name, g, move in zip(net.trained, after, moves, strict=True)
            }
        return {name: change[name] for name in weights}

    def train(self, model: Tensors, job: Job) -> Trained:
        """Train from ``model`` as the job says.

        With a threshold, weights below it at the start come back as they were, to the bit.
        """
        self.model.load(model)
        statistics = self._statistics(job) if job.static_norm else {}
        network, where = (self.model, {}) if job.width == 1 else self.model.narrow(job.width)
        network.to(self.device)
        exits = job.exits if job.distil else useful_exits(network, job.selected, job.exits)
        reset_peak_memory(self.device)
        with (
            self._own_randomness(job.seed),
            elastic(
                network,
                job.selected,
                exits,
                job.end,
                track_statistics=not job.static_norm,
                after_layer=self._scalers(network, job),
                split_bias=job.threshold is None,
            ) as net,
        ):
            start = {name: p.detach().clone() for name, p in net.trained.items()} if _needs_start(job) else {}
            with thresholded(network, job.threshold):
                begin = stamp(self.device)
                loss, loss_square = self._steps(net, job, start, where)
                seconds = seconds_between(begin, stamp(self.device))
            if job.threshold is not None:
                _restore_small(network, net, start, job.threshold)
            patches = _patches(net, where) | statistics
        return Trained(
            patches=patches,
            effective_steps=optim.effective_steps(job.num_steps, job.work, job.proximal),
            loss=loss,
            loss_square=loss_square,
            seconds=seconds,
            peak_memory_bytes=peak_memory_bytes(self.device),
        )

    def _steps(
        self, net: Elastic, job: Job, start: Mapping[str, Tensor], where: Mapping[str, Where]
    ) -> tuple[float, float]:
        """Mean loss, and Oort's moving average of the squared sample loss over the first pass."""
        rng = generator(job.seed, "batches")
        stream = batch_stream(self.indices, job.work, rng)
        first_pass = max(1, -(-self.num_samples // job.work.batch_size))
        present = self._present if job.masked_loss else None
        drift = self._drift(net, job, where)
        optimiser = optim.build(net.trained.values(), job.work) if net.trained else None
        losses = torch.zeros(job.num_steps, dtype=torch.float64, device=self.device)
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for step in range(job.num_steps):
            x, y = self._batch(next(stream), rng)
            loss, each = objective(net.logits(x), y, job.distil, present)
            if optimiser is not None and loss.requires_grad:
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                _regularise_and_step(optimiser, net.trained, start, drift, job)
            losses[step] = each.mean()
            if step < first_pass:
                squared = each.double().square().mean()
                square = squared if step == 0 else 0.8 * square + 0.2 * squared
        return float(losses.mean()) if job.num_steps else 0.0, float(square)

    def _gradients(self, net: Elastic, h: Tensor, y: Tensor, parameters: list[Tensor]) -> list[Tensor]:
        loss, _ = objective(net.window_logits(h), y)
        return list(torch.autograd.grad(loss, parameters, materialize_grads=True))

    def _batch(self, indices: Array, rng: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        x, y = self.data.train_batch(indices, rng)
        return torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device)

    def _drift(self, net: Elastic, job: Job, where: Mapping[str, Where]) -> dict[str, Tensor]:
        drift = {name: h for name, h in job.dyn_drift.items() if job.dyn_alpha and name in net.trained}
        return {
            name: torch.from_numpy(np.array(h[_index(where.get(name))], dtype=np.float32)).to(self.device)
            for name, h in drift.items()
        }

    def _scalers(self, network: BlockModel, job: Job) -> dict[nn.Module, Any]:
        """HeteroFL divides the output of every layer that was made narrower by the width."""
        if not job.width_scaler or job.width == 1:
            return {}
        full = self.spec.by_name
        return {
            network.get_submodule(t.name.removesuffix(".weight")): partial(torch.mul, other=1 / job.width)
            for t in network.spec.weights
            if t.name.endswith(".weight") and len(t.shape) > 1 and t.shape[0] < full[t.name].shape[0]
        }

    def _statistics(self, job: Job) -> dict[str, Patch]:
        """Batch norm statistics of the model as it came, at full width, over the client's own data.

        Those of a narrow model after training would not fit the mean of narrow and wide ones, which is what
        is tested. These fit the model of the round before.
        """
        exits = useful_exits(self.model, job.selected, job.exits)
        with elastic(self.model, job.selected, exits, job.end) as net:
            norms = [norm for norm in net.norms() if norm.running_mean is not None]
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None
            order = generator(job.seed, "statistics").permutation(self.indices)
            size = min(job.work.batch_size, len(order))
            for start in range(0, len(order) // size * size, size)[:MAX_STATISTICS_BATCHES] if norms else ():
                x, _ = self._batch(np.resize(order[start : start + size], max(2, size)), None)
                with torch.no_grad():
                    net.logits(x)
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            trained = net.trained
            return {name: patch for name, patch in _patches(net, {}).items() if name not in trained}

    @contextmanager
    def _own_randomness(self, seed: int) -> Iterator[None]:
        """Dropout and the like draw from the seed; the process's own stream is left where it was."""
        with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
            torch.manual_seed(seed)
            yield


def _needs_start(job: Job) -> bool:
    return bool(job.proximal or job.dyn_alpha) or job.threshold is not None


def _regularise_and_step(
    optimiser: torch.optim.Optimizer,
    trained: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    drift: Mapping[str, Tensor],
    job: Job,
) -> None:
    """One optimiser step, with FedDyn in the gradient and FedProx's pull after momentum, as in FedNova."""
    with torch.no_grad():
        if job.dyn_alpha:
            for name, p in trained.items():
                if p.grad is not None:
                    p.grad.add_(p - start[name], alpha=job.dyn_alpha)
                    if name in drift:
                        p.grad.sub_(drift[name])
        optim.clip([p.grad for p in trained.values() if p.grad is not None], job.work.clip_norm)
        away = {name: p - start[name] for name, p in trained.items()} if job.proximal else {}
        optimiser.step()
        for name, distance in away.items():
            trained[name].sub_(distance, alpha=job.work.lr * job.proximal)


def _restore_small(network: BlockModel, net: Elastic, start: Mapping[str, Tensor], threshold: float) -> None:
    """Weight decay has moved weights that took no part; undo it."""
    with torch.no_grad():
        for name, _, _ in masked_tensors(network):
            if name in start:
                net.trained[name].copy_(
                    torch.where(start[name].abs() >= threshold, net.trained[name], start[name])
                )


def _patches(net: Elastic, where: Mapping[str, Where]) -> dict[str, Patch]:
    """What was trained, and the statistics of the blocks and exits that ran in training mode."""
    buffers = dict(net.model.named_buffers())
    moved = {id(b) for norm in net.norms() for b in norm.buffers()}
    patches = {}
    for t in net.model.spec.tensors:
        value = net.trained.get(t.name)
        if value is None and t.role is Role.BUFFER and id(buffers[t.name]) in moved:
            value = buffers[t.name]
        if value is not None:
            patches[t.name] = Patch(value.detach().cpu().numpy().copy(), where.get(t.name))
    return patches


def _index(where: Where) -> Any:
    return ... if where is None else where
