"""Early-exit heads: the small output layer after a block (section 4.2)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from fedel.errors import ModelError


class MeanOverTokens(nn.Module):
    """(N, L, H) -> (N, H)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def make_exit(
    shape: Sequence[int], num_classes: int, *, tokens: bool = False, each_token: bool = False
) -> nn.Sequential:
    """A head for a block whose output has ``shape``, batch first.

    Images and sounds (N, C, ...) are averaged over their positions; features (N, C) are used directly.
    With ``tokens`` a three-dimensional output is (N, L, H) instead of (N, C, L); with ``each_token``
    every token gets its own logits.
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
    return nn.Sequential(
        OrderedDict(pool=pools[len(shape)](1), flatten=nn.Flatten(), linear=nn.Linear(shape[1], num_classes))
    )
