"""Early-exit heads: the small output layer after a block (section 4.2)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from fedel.errors import ModelError

EXIT_FEATURES = 512
"""The most features that the linear layer of an exit reads, unless its block has more channels."""
MOST_CELLS = 25
"""The most parts over which an exit averages a channel: 5 x 5 of an image."""


class MeanOverTokens(nn.Module):
    """(N, L, H) -> (N, H)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class GridExit(nn.Sequential):
    """Averages over the cells of a grid, and a linear layer; after the flatten, all cells of a channel are
    neighbours."""

    def __init__(self, pool: nn.Module, channels: int, num_cells: int, num_classes: int) -> None:
        linear = nn.Linear(channels * num_cells, num_classes)
        super().__init__(OrderedDict(pool=pool, flatten=nn.Flatten(), linear=linear))
        self.channels = channels


def make_exit(
    shape: Sequence[int],
    num_classes: int,
    *,
    features: int = EXIT_FEATURES,
    tokens: bool = False,
    each_token: bool = False,
) -> nn.Sequential:
    """A head for a block whose output has ``shape``, batch first; a side that is not known is 0.

    Images and sounds (N, C, ...) are averaged over the cells of a grid, as fine as ``features`` allows: after
    the first blocks it matters where in an image something is. With ``features`` 0 each channel has one
    average. Features (N, C) are used directly. With ``tokens`` a three-dimensional output is (N, L, H)
    instead of (N, C, L); with ``each_token`` every token gets its own logits.
    """
    if tokens and len(shape) == 3:
        pool = OrderedDict() if each_token else OrderedDict(pool=MeanOverTokens())
        return nn.Sequential(
            OrderedDict(norm=nn.LayerNorm(shape[-1]), **pool, linear=nn.Linear(shape[-1], num_classes))
        )
    if len(shape) == 2:
        return nn.Sequential(OrderedDict(linear=nn.Linear(shape[1], num_classes)))
    pools = {3: nn.AdaptiveAvgPool1d, 4: nn.AdaptiveAvgPool2d, 5: nn.AdaptiveAvgPool3d}
    if len(shape) not in pools:
        raise ModelError(
            f"no exit fits an output of shape {tuple(shape)}: it needs a batch and a channel dimension and at"
            " most three more; make the block return such a tensor, or give the model a method exits()"
        )
    grid = exit_grid(shape, features)
    return GridExit(pools[len(shape)](grid), shape[1], math.prod(grid), num_classes)


def exit_grid(shape: Sequence[int], features: int) -> tuple[int, ...]:
    """Cells along each side of the output (N, C, ...) of a block, for at most ``features`` of them in all.

    >>> [exit_grid((1, channels, 14, 14), 512) for channels in (8, 32, 64, 1024)]
    [(5, 5), (4, 4), (2, 2), (1, 1)]
    >>> exit_grid((1, 8, 3, 0), 512), exit_grid((1, 64, 100), 512)
    ((3, 5), (8,))
    """
    if features < 0:
        raise ModelError(
            f"exit_features is {features}; give the number of features that an exit may have, such as"
            f" {EXIT_FEATURES}, or 0 for one average per channel"
        )
    _, channels, *sides = shape
    cells = max(1, min(MOST_CELLS, features // channels))
    side = int(cells ** (1 / len(sides)) + 1e-9)
    return tuple(min(side, known or side) for known in sides)
