"""Two ways to read a tensor of a version: a copy, and a view of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fedel_aggregator.errors import Damaged
from fedel_aggregator.tensor_file import TensorFile, TensorWriter

VALUES = {
    "small": np.arange(3, dtype=np.float32),
    "scalar": np.array(0.5, np.float32),
    "pages": np.arange(3 * 1024, dtype=np.float32).reshape(3, 1024),  # 12 kB, not from a page's beginning
    "last": np.full((1, 2), -1.0, np.float32),
}


def test_a_view_has_the_values_of_a_copy_and_its_checksum_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "tensors"
    with path.open("w+b") as file:
        writer = TensorWriter(file.fileno(), [(name, values.shape) for name, values in VALUES.items()])
        crc32 = {name: writer.put(name, values) for name, values in VALUES.items()}
    with TensorFile(path) as stored:
        for name, values in VALUES.items():
            copy, view = stored.tensor(name, crc32[name]), stored.mapped(name, crc32[name])
            assert values.shape == copy.shape == view.shape
            assert values.tobytes() == copy.tobytes() == view.tobytes()
            assert not view.flags.writeable
            with pytest.raises(Damaged, match=f"tensor '{name}' is not what was written"):
                stored.mapped(name, crc32[name] ^ 1)
    assert VALUES["last"].tobytes() == view.tobytes(), "a view is good after its file was closed"
