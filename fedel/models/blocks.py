"""A network as a list of blocks with early exits; a window slides over the blocks (section 4.2)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fedel.config import nearest
from fedel.errors import ModelError
from fedel.types import Array, ModelSpec, Role, Tensors, TensorSpec, Where


class BlockModel(nn.Module):
    """Blocks in forward order; every block but the last, which is the classifier, has an exit head.

    With ``exit_each`` the last block has one too, and strategies select among the heads: their tensors
    count as weights of their blocks (for a frozen trunk, as in ALBERT's mode ``frozen``).
    """

    def __init__(
        self,
        name: str,
        blocks: Mapping[str, nn.Module],
        exits: Mapping[str, nn.Module],
        *,
        num_classes: int,
        stages: tuple[int, ...] = (),
        exit_each: bool = False,
        frozen: Collection[str] = (),
        example: Tensor | None = None,
    ) -> None:
        """``frozen`` lists tensors, or modules such as ``blocks.layer1``, that never change.

        ``example`` is an input of batch size 1; a narrowed copy is tested on it before it is used.
        """
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)
        self.exits = nn.ModuleDict(exits)
        self.num_classes = num_classes
        self.example = example
        self.block_names = tuple(blocks)
        _check_exits(name, self.block_names, tuple(exits), exit_each)
        self.spec = ModelSpec(
            name=name,
            block_names=self.block_names,
            tensors=tuple(_tensor_specs(self, exit_each, frozen)),
            stages=stages or (len(self.block_names),),
            exit_each=exit_each,
        )
        named = self._named()
        for t in self.spec.tensors:
            if t.role is Role.FROZEN:
                named[t.name].requires_grad_(False)

    def run(self, x: Tensor, first: int, last: int) -> Tensor:
        """The output of block ``last`` for the input ``x`` of block ``first``."""
        for name in self.block_names[first - 1 : last]:
            x = self.blocks[name](x)
        return x

    def exit(self, block: int, h: Tensor) -> Tensor:
        """Logits of the exit after ``block`` for the output of that block."""
        name = self.block_names[block - 1]
        return self.exits[name](h) if name in self.exits else h

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the whole network, from its classifier."""
        last = len(self.block_names)
        return self.exit(last, self.run(x, 1, last))

    def all_exits(self, x: Tensor) -> list[Tensor]:
        """Logits of every exit in one pass, deepest last."""
        logits = []
        for block in range(1, len(self.block_names) + 1):
            x = self.run(x, block, block)
            logits.append(self.exit(block, x))
        return logits

    def tensors(self) -> dict[str, Array]:
        """A copy of every tensor of ``spec``."""
        named = self._named()
        return {t.name: named[t.name].detach().cpu().numpy().copy() for t in self.spec.tensors}

    def load(self, tensors: Tensors, exits: Collection[int] = ()) -> None:
        """Load values for all tensors of ``spec``; with ``exits``, at least for those that a training through
        these uses. A tensor that is not given becomes NaN: what was in it before reaches no result."""
        used = self.spec.tensors_for(exits) if exits else self.spec.by_name.keys()
        self._check(tensors, used)
        named = self._named()
        with torch.no_grad():
            for name in self.spec.by_name:
                if name in tensors:
                    named[name].copy_(torch.from_numpy(np.array(tensors[name], dtype=np.float32)))
                else:
                    named[name].fill_(torch.nan)

    def narrow(self, width: float) -> tuple[BlockModel, dict[str, Where]]:
        """HeteroFL's sub-model: the first ``ceil(width * C)`` channels of every hidden layer.

        Returns a smaller model with the same values, and the place of each of its tensors in the full model.
        """
        from fedel.models.narrow import narrow

        return narrow(self, width)

    def _named(self) -> dict[str, Tensor]:
        return {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }

    def _check(self, tensors: Tensors, used: Collection[str]) -> None:
        spec, model = self.spec.by_name, self.spec.name
        for name in tensors:
            if name not in spec:
                raise ModelError(
                    f"model {model} has no tensor '{name}' ({nearest(name, spec)}); load weights that were"
                    " saved from the same model and options"
                )
        for name, t in spec.items():
            if name not in tensors and name in used:
                raise ModelError(
                    f"tensor '{name}' (block {t.block}) of model {model} is missing among the"
                    f" {len(tensors)} given; load all {len(used)} tensors that are used (a method names them in"
                    " tensors_needed)"
                )
            if name in tensors and tuple(tensors[name].shape) != t.shape:
                raise ModelError(
                    f"tensor '{name}' (block {t.block}) of model {model} has shape {t.shape}, but the values"
                    f" given have {tuple(tensors[name].shape)}; use the same classes, width and options"
                    + (" (exits with one average per channel: exit_features = 0)" if t.in_exit else "")
                )


def _check_exits(model: str, blocks: tuple[str, ...], exits: tuple[str, ...], exit_each: bool) -> None:
    if len(blocks) < 2:
        raise ModelError(
            f"model {model} has {len(blocks)} block(s), but a window needs at least 2 to slide over;"
            " split the network into more blocks"
        )
    wanted = blocks if exit_each else blocks[:-1]
    for name in wanted:
        if name not in exits:
            raise ModelError(f"block '{name}' of model {model} has no exit; give every block of {wanted} one")
    for name in exits:
        if name not in wanted:
            raise ModelError(f"model {model} has an exit for '{name}', which is not one of the blocks {wanted}")


def _tensor_specs(model: BlockModel, exit_each: bool, frozen: Collection[str]) -> Iterator[TensorSpec]:
    """Per block: its parameters and statistics, then those of the exit after it; each tensor once."""
    owners: dict[int, tuple[str, Role]] = {}
    for number, name in enumerate(model.block_names, start=1):
        parts = [("blocks", model.blocks[name], Role.WEIGHT)]
        if name in model.exits:
            parts.append(("exits", model.exits[name], Role.WEIGHT if exit_each else Role.EXIT))
        for part, module, role in parts:
            place = f"{part}.{name}"
            for tensor, value, its_role in _named_with_roles(module, place, role):
                if any(tensor == f or tensor.startswith(f + ".") for f in frozen):
                    its_role = Role.FROZEN
                owner, owner_role = owners.setdefault(id(value), ("", its_role))
                if not owner:
                    owners[id(value)] = (place, its_role)
                    yield _spec_of(tensor, number, value, its_role)
                elif owner != place and owner_role is not Role.FROZEN:
                    raise ModelError(
                        f"block {number} '{name}' uses tensor '{tensor}', which already belongs to '{owner}';"
                        " blocks are trained separately, so give each its own weights (copy.deepcopy the"
                        " shared layer) or put the layers that share weights into one block"
                    )


def _named_with_roles(module: nn.Module, place: str, role: Role) -> Iterator[tuple[str, Tensor, Role]]:
    for tensor, parameter in module.named_parameters(place, remove_duplicate=False):
        yield tensor, parameter, role
    for tensor, buffer in module.named_buffers(place, remove_duplicate=False):
        if buffer.is_floating_point():
            yield tensor, buffer, Role.BUFFER


def _spec_of(name: str, block: int, value: Tensor, role: Role) -> TensorSpec:
    if value.dtype is not torch.float32:
        raise ModelError(
            f"tensor '{name}' (block {block}) is {str(value.dtype).removeprefix('torch.')};"
            " FedEL exchanges float32 only, so call .float() on the model"
        )
    return TensorSpec(name, block, tuple(value.shape), role)
