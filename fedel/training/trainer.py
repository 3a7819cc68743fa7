"""Torch behind the Trainer port: local training and the importance probe (paper, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedel.core.steps import effective_steps, least_samples, shortened
from fedel.data.dataset import Dataset
from fedel.errors import DataError
from fedel.models.blocks import BlockModel
from fedel.seeds import generator
from fedel.training import optim
from fedel.training.batches import batch_stream, to_torch
from fedel.training.clock import peak_memory_bytes, reset_peak_memory, seconds_between, stamp
from fedel.training.elastic import Elastic, elastic, useful_exits
from fedel.training.hooks import (
    TorchTraining,
    change_gradients,
    loss_of,
    narrowed_layers,
    reweighted,
    take_step,
)
from fedel.training.objective import objective
from fedel.training.prefix_cache import PrefixCache
from fedel.types import (
    MAX_STATISTICS_BATCHES,
    Array,
    LocalWork,
    ModelSpec,
    Patch,
    Role,
    Tensors,
    TimingProfile,
    Trained,
    TrainSpec,
    Where,
    Window,
)


class TorchTrainer:
    """Trains one client's samples. Results depend on the arguments only, never on earlier calls.

    The model is scratch space: trainers of one process may share it, one call at a time. Only the tensors that
    run have to be given.
    """

    def __init__(
        self,
        model: BlockModel,
        data: Dataset,
        indices: Array,
        profile: TimingProfile,
        device: str | torch.device = "cpu",
        measure: Callable[[], TimingProfile] | None = None,
        compute: str = "exact",
    ) -> None:
        """``measure`` makes a new timing profile; without it, ``profile`` is for good. ``compute``: see
        ``settings.COMPUTE``."""
        if len(indices) == 0:
            raise DataError(f"a client of {data.name} holds no samples; give each one, or use fewer clients")
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.data = data
        self.indices = np.asarray(indices)
        self._profile, self._measure, self._compute = profile, measure, compute

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

    def profile_again(self) -> bool:
        if self._measure is None:
            return False
        self._profile = self._measure()
        return True

    @property
    def same_inputs(self) -> bool:
        """Whether a sample gives the same input each time it comes."""
        return not self.data.augmented

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        """First-order loss change <g1, dw> of every weight in the window, by a trial step."""
        weights = [t.name for t in self.spec.weights_in(window.end, window.front)]
        exits = self.spec.exits_for(window.end, window.front)
        self.model.load(model, exits)
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

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        """Train from ``model`` as ``train_spec`` says."""
        self.model.load(model, train_spec.exits)
        work, hooks = train_spec.work, train_spec.hooks
        statistics = self._statistics(train_spec) if train_spec.static_norm else {}
        network, where = (self.model, {}) if train_spec.width == 1 else self.model.narrow(train_spec.width)
        network.to(self.device)
        exits = train_spec.exits
        if not any(hook.all_exits for hook in hooks):
            exits = useful_exits(network, train_spec.selected, exits)
        reset_peak_memory(self.device)
        with (
            self._own_randomness(train_spec.seed),
            elastic(
                network,
                train_spec.selected,
                exits,
                train_spec.end,
                track_statistics=not train_spec.static_norm,
                after_layer=narrowed_layers(self.model, network, hooks),
                split_bias=not any(hook.reweighted() for hook in hooks),
                detached=train_spec.detached,
            ) as net,
        ):
            training = TorchTraining(work, net.trained, model, where, self.device)
            with reweighted(network, hooks):
                begin = stamp(self.device)
                num_steps, last_share, loss, loss_square = self._steps(net, train_spec, training)
                seconds = seconds_between(begin, stamp(self.device))
            with torch.no_grad():
                for hook in hooks:
                    hook.finish(training)
            patches = _patches(net, where) | statistics
        return Trained(
            patches=patches,
            num_steps=num_steps,
            effective_steps=effective_steps(num_steps, work),
            loss=loss,
            loss_square=loss_square,
            seconds=seconds,
            peak_memory_bytes=peak_memory_bytes(self.device),
            last_share=last_share,
        )

    def _steps(
        self, net: Elastic, train_spec: TrainSpec, training: TorchTraining
    ) -> tuple[int, float, float, float]:
        """Steps made, the share of a batch in the last of them, mean loss, and Oort's moving average of the
        squared sample loss over the first pass."""
        work = train_spec.work
        rng = generator(train_spec.seed, "batches")
        next_batch = self._entrances(net, train_spec, rng)
        first_pass = max(1, -(-self.num_samples // work.batch_size))
        optimiser = optim.build(net.trained.values(), work) if net.trained else None
        losses: list[Tensor] = []
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        last_share = 1.0
        while share := self._next_share(train_spec, len(losses)):
            last_share = share
            h, y = next_batch(share)
            loss, each = loss_of(train_spec.hooks, training, net.window_logits(h), y)
            if optimiser is not None and loss.requires_grad:
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    change_gradients(train_spec.hooks, training)
                    optim.clip([p.grad for p in net.trained.values() if p.grad is not None], work.clip_norm)
                    take_step(train_spec.hooks, training, optimiser.step)
            if len(losses) < first_pass:
                squared = each.detach().double().square().mean()
                square = 0.8 * square + 0.2 * squared if losses else squared
            losses.append(each.detach().mean())
        loss_mean = float(torch.stack(losses).double().mean()) if losses else 0.0
        return len(losses), last_share, loss_mean, float(square)

    def _next_share(self, train_spec: TrainSpec, num_done: int) -> float:
        if train_spec.pace is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a clock is read when the step is done, not when it is queued
        return train_spec.next_share(num_done)

    def _entrances(
        self, net: Elastic, train_spec: TrainSpec, rng: np.random.Generator
    ) -> Callable[[float], tuple[Tensor, Tensor]]:
        """Gives what enters the window for a share of the next batch, and the targets; kept where the same
        comes again."""

        def entrance(indices: Array) -> tuple[Tensor, Tensor]:
            x, y = self._batch(indices, rng)
            return net.entrance(x), y

        work, max_bytes = train_spec.work, train_spec.prefix_cache_bytes
        batches, size = batch_stream(self.indices, work, rng), min(work.batch_size, self.num_samples)
        comes_again = train_spec.num_steps * size > self.num_samples and self.same_inputs
        take: Callable[[Array], tuple[Tensor, Tensor]] = entrance
        least = least_samples(self.spec)
        if max_bytes and comes_again and net.end > 1:
            cache = PrefixCache(batches, entrance, self.num_samples, size, max_bytes)
            batches, take = cache.batches(), cache.take

        def next_batch(share: float) -> tuple[Tensor, Tensor]:
            batch = next(batches)
            return take(batch if share == 1 else batch[: shortened(len(batch), share, least)])

        return next_batch

    def _gradients(self, net: Elastic, h: Tensor, y: Tensor, parameters: list[Tensor]) -> list[Tensor]:
        loss, _ = objective(net.window_logits(h), y)
        return list(torch.autograd.grad(loss, parameters, materialize_grads=True))

    def _batch(self, indices: Array, rng: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        return to_torch(self.data.train_batch(indices, rng), self.device, self._compute)

    def _statistics(self, train_spec: TrainSpec) -> dict[str, Patch]:
        """Batch norm statistics of the model as it came, at full width, over the client's own data.

        Those of a narrow model after training would not fit the mean of narrow and wide ones, which is what
        is tested. These fit the model of the round before.
        """
        exits = useful_exits(self.model, train_spec.selected, train_spec.exits)
        with elastic(self.model, train_spec.selected, exits, train_spec.end) as net:
            norms = [norm for norm in net.norms() if norm.running_mean is not None]
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None
            order = generator(train_spec.seed, "statistics").permutation(self.indices)
            size = min(train_spec.work.batch_size, len(order))
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
