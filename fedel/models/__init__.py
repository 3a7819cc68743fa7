"""Models: each is a list of blocks with an early exit after each block but the last."""

from fedel.models.blocks import BlockModel
from fedel.models.custom import as_block_model, load_model
from fedel.models.registry import MODELS, build
from fedel.models.split import split

__all__ = ["MODELS", "BlockModel", "as_block_model", "build", "load_model", "split"]
