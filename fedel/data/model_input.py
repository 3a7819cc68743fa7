"""What a run's model takes and what its answers mean, kept with the run: without it a model cannot be used.

The mean and deviation with which images are normalised come from the data, so no other file of a run says them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedel.data.dataset import Dataset
from fedel.data.transforms import Images, LogMel, MaskedTokens, Plain
from fedel.files import write_atomic
from fedel.job import Workload
from fedel.serialisation import from_json, to_json
from fedel.types import Array

FILE = "input.json"


@dataclass(frozen=True)
class Normalisation:
    """From stored values to the model's input: ``(value / scale - mean) / std``, for each channel."""

    scale: float
    """255 for bytes, 1 for floats."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if min((self.scale, *self.std)) <= 0:
            raise ValueError("the scale and the deviations are above 0")

    def factors(self) -> tuple[Array, Array]:
        """The same as ``value * factor - shift``, in the bits of ``transforms.normalise``."""
        std = np.asarray(self.std, np.float32)
        return 1.0 / (self.scale * std), np.asarray(self.mean, np.float32) / std


@dataclass(frozen=True)
class ModelInput:
    """``input.json``."""

    shape: tuple[int, ...]
    """Of one sample, without the batch."""
    dtype: str
    """``float32``, or ``int64`` for tokens."""
    classes: tuple[str, ...]
    """In the order of the model's outputs."""
    normalisation: Normalisation | None = None
    """Of images and sounds; ``None`` where the model takes the data as it is."""
    transform: str = ""
    """Name of a transform of the user's own, which the model's input has to go through first."""

    @staticmethod
    def of(data: Dataset) -> ModelInput:
        sample, _ = data.train_batch(np.arange(1))
        transform, stored = data.transform, data.train.x.dtype
        normalisation, own = None, ""
        if isinstance(transform, Images | LogMel):
            mean, std = transform.mean or (0.0,), transform.std or (1.0,)
            normalisation = Normalisation(255.0 if stored == np.uint8 else 1.0, mean, std)
        elif not isinstance(transform, Plain | MaskedTokens):
            own = type(transform).__qualname__
        return ModelInput(sample.shape[1:], sample.dtype.name, data.classes, normalisation, own)

    @staticmethod
    def declared(workload: Workload) -> ModelInput | None:
        """What the job says, if it says so: the data is on the devices then."""
        if not workload.input:
            return None
        return ModelInput(workload.input, workload.input_dtype, workload.class_names)

    def objection_to(self, data: Dataset) -> str:
        """Why a device with this data cannot train a model that takes this; empty if it can.

        Not every device has every class.
        """
        sample, _ = data.train_batch(np.arange(1))
        if sample.shape[1:] != self.shape:
            return (
                f"its samples have the shape {list(sample.shape[1:])}, the job says input = {list(self.shape)}"
            )
        if sample.dtype.name != self.dtype:
            return f"its samples are {sample.dtype.name}, the job says input_dtype = '{self.dtype}'"
        if data.num_classes > len(self.classes):
            return f"it has {data.num_classes} classes, the job says {len(self.classes)}"
        return ""

    @staticmethod
    def load(directory: Path) -> ModelInput | None:
        """``None`` if the run was made before FedEL kept it."""
        file = directory / FILE
        return from_json(ModelInput, file.read_bytes(), str(file)) if file.exists() else None

    def save(self, directory: Path) -> None:
        write_atomic(directory / FILE, to_json(self, pretty=True) + "\n")

    def samples(self, number: int) -> Array:
        """An input of zeros, for what only depends on its shape."""
        return np.zeros((number, *self.shape), self.dtype)

    def in_words(self, normalised: bool) -> str:
        """How to call the model; ``normalised`` if it normalises its input itself."""
        batch = f"{self.dtype} of shape (N, {', '.join(map(str, self.shape))})"
        scale = self.normalisation
        if self.transform:
            return f"{batch}, as the transform {self.transform} of the data returns it"
        if scale is None:
            return f"{batch}, as in the data"
        values = f"values from 0 to {scale.scale:g}" if scale.scale != 1 else "values as in the data"
        if normalised:
            return f"{batch}, {values}; the model normalises them itself"
        divided = f"x / {scale.scale:g}" if scale.scale != 1 else "x"
        return f"{batch}: ({divided} - mean) / std of {values}, with the mean and std of each channel"
