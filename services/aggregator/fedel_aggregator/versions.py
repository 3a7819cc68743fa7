"""The versions of a run's model on disk: for each a safetensors file, its facts, and the strategy's tensors.

Of the newest version there is also the answer to SealRound, should the coordinator ask for it again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError

from fedel.errors import UpdateRefused
from fedel.files import TEMPORARY, open_atomic
from fedel.roles.aggregator import Content
from fedel.serialisation import parse_json
from fedel.types import Array, ModelSpec, Tensors
from fedel.v1.aggregator_pb2 import CommitRoundResponse, SealRoundResponse
from fedel_aggregator.errors import MALFORMED, damaged
from fedel_aggregator.private_files import FILE_MODE, make_folder, write_private
from fedel_aggregator.tensor_file import Shapes, TensorFile, TensorWriter, identity

VERIFY_SECONDS = 60.0
"""Downloads of a version have all its checksums verified once in this time, not every time; and whenever its
file is another, or was changed."""
_OWN_NAME = re.compile(r"(\d{6,})\.(json|safetensors|state\.safetensors|sealed\.pb)")
"""Files with other names are not ours: they are ignored."""


@dataclass(frozen=True)
class Meta:
    """The facts about a version. A version exists once this is on disk."""

    version: int
    crc32: dict[str, int]
    changed: dict[str, int]
    """The version in which each tensor got its current bits."""
    counted: dict[str, Content] = field(default_factory=dict)
    """The updates that made it, by client."""
    committed: dict[str, Any] = field(default_factory=dict)
    """The answer to CommitRound of the round that made it."""
    state_crc32: dict[str, int] = field(default_factory=dict)
    """Checksums of the strategy's own tensors."""


class Versions:
    """The versions of one run; ``spec`` has the tensors that are kept here."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._folder, self._spec = folder, spec
        self._verifying = Lock()
        self._verified: dict[int, tuple[tuple[int, ...], float]] = {}
        """Which file of a version is sound, and since when: it was just written, or verified."""
        make_folder(folder)

    def all(self) -> list[int]:
        names = (_OWN_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(name[1]) for name in names if name and name[2] == "json")

    def path(self, version: int) -> Path:
        return self._folder / f"{version:06d}.safetensors"

    def meta_path(self, version: int) -> Path:
        return self._folder / f"{version:06d}.json"

    def state_path(self, version: int) -> Path:
        return self._folder / f"{version:06d}.state.safetensors"

    def _sealed_path(self, version: int) -> Path:
        return self._folder / f"{version:06d}.sealed.pb"

    def meta(self, version: int) -> Meta:
        path = self.meta_path(version)
        try:
            meta = read_meta(path)
        except FileNotFoundError:
            raise self._missing(version) from None
        except MALFORMED as error:
            raise damaged("version file", path, f"it cannot be read ({error})") from None
        if meta.version != version or meta.crc32.keys() != self._spec.by_name.keys():
            raise damaged("version file", path, f"it is not of version {version} of this model")
        return meta

    def tensors(self, version: int) -> Tensors:
        """The tensors of a version, each read from its file when it is looked up."""
        return _VersionTensors(self, version)

    def open(self, version: int) -> TensorFile:
        try:
            file = TensorFile(self.path(version))
        except FileNotFoundError:
            if version in self.all():
                raise damaged("version file", self.path(version), "it is missing") from None
            raise self._missing(version) from None
        for tensor in self._spec.tensors:
            place = file.places.get(tensor.name)
            if place is None or place.shape != tensor.shape:
                with file:
                    raise damaged("version file", self.path(version), f"tensor '{tensor.name}' is missing")
        return file

    def _missing(self, version: int) -> UpdateRefused:
        kept = ", ".join(map(str, self.all())) or "none"
        return UpdateRefused("unknown_version", f"version {version} is not kept here; these are: {kept}")

    def verify(self, meta: Meta) -> None:
        """Verify all checksums of a version, unless its file was written or verified a moment ago."""
        with self._verifying:
            if self._is_fresh(meta.version):
                return
            with self.open(meta.version) as file:
                for name, crc32 in meta.crc32.items():
                    file.verify(name, crc32)
            self._verified[meta.version] = file.identity, time.monotonic()

    def _is_fresh(self, version: int) -> bool:
        try:
            found, (seen, since) = self.path(version).stat(), self._verified[version]
        except (FileNotFoundError, KeyError):
            return False
        return identity(found) == seen and time.monotonic() - since < VERIFY_SECONDS

    @contextmanager
    def write(self, version: int, shapes: Shapes) -> Iterator[TensorWriter]:
        """Write the tensors of a new version, which exists only after ``publish``."""
        self._verified.pop(version, None)
        with open_atomic(self.path(version), mode=FILE_MODE) as file:
            yield TensorWriter(file.fileno(), shapes)

    def write_state(self, version: int, state: Tensors) -> dict[str, int]:
        """Write the strategy's own tensors, if it has any; returns their checksums."""
        if not state:
            return {}
        names = sorted(state)
        with open_atomic(self.state_path(version), mode=FILE_MODE) as file:
            writer = TensorWriter(file.fileno(), [(name, state[name].shape) for name in names])
            return {name: writer.put(name, state[name]) for name in names}

    def read_state(self, meta: Meta) -> dict[str, Array]:
        if not meta.state_crc32:
            return {}
        with self.open_state(meta) as file:
            return {name: file.tensor(name, crc32) for name, crc32 in meta.state_crc32.items()}

    def open_state(self, meta: Meta) -> TensorFile:
        """The strategy's and the server's own tensors, of a version that has any."""
        path = self.state_path(meta.version)
        try:
            file = TensorFile(path)
        except FileNotFoundError:
            raise damaged("version file", path, "it is missing") from None
        if file.places.keys() != meta.state_crc32.keys():
            with file:
                raise damaged("version file", path, "it does not have the tensors that were written")
        return file

    def write_sealed(self, version: int, answer: SealRoundResponse) -> None:
        write_private(self._sealed_path(version), answer.SerializeToString())

    def sealed(self, version: int) -> SealRoundResponse:
        """The answer to SealRound of the round that made the newest version."""
        path = self._sealed_path(version)
        try:
            return SealRoundResponse.FromString(path.read_bytes())
        except (FileNotFoundError, DecodeError) as error:
            raise damaged("answer of a sealed round", path, f"it cannot be read ({error})") from None

    def committed(self, meta: Meta) -> CommitRoundResponse:
        try:
            return ParseDict(meta.committed, CommitRoundResponse())
        except (ParseError, *MALFORMED) as error:
            path = self.meta_path(meta.version)
            raise damaged("version file", path, f"its answer cannot be read ({error})") from None

    def publish(self, meta: Meta) -> None:
        """From here on the version, whose tensors are written, exists."""
        written = identity(self.path(meta.version).stat())
        write_private(self.meta_path(meta.version), json.dumps(asdict(meta)))
        self._verified[meta.version] = written, time.monotonic()

    def delete(self, version: int) -> None:
        # The meta file first: a version without its tensors must never seem to exist.
        for path in (self.meta_path(version), self.state_path(version), self.path(version)):
            path.unlink(missing_ok=True)
        self.forget_answer(version)
        self._verified.pop(version, None)

    def forget_answer(self, version: int) -> None:
        """Only of the newest version is the answer asked for again."""
        self._sealed_path(version).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove what a crash left unfinished."""
        kept = set(self.all())
        for path in self._folder.iterdir():
            name = _OWN_NAME.fullmatch(path.name)
            if path.name.endswith(TEMPORARY) or (name and int(name[1]) not in kept):
                path.unlink()


class _VersionTensors(Mapping[str, Array]):
    def __init__(self, versions: Versions, version: int) -> None:
        self._versions, self._version = versions, version

    @cached_property
    def _crc32(self) -> Mapping[str, int]:
        return self._versions.meta(self._version).crc32

    def __getitem__(self, name: str) -> Array:
        crc32 = self._crc32[name]
        with self._versions.open(self._version) as file:
            return file.tensor(name, crc32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._crc32)

    def __len__(self) -> int:
        return len(self._crc32)


def read_meta(path: Path) -> Meta:
    """``MALFORMED`` if the file makes no sense."""
    table = parse_json(path.read_bytes())
    counted = {client: Content(*entry) for client, entry in table.pop("counted").items()}
    meta = Meta(**table, counted=counted)
    numbers: list[Mapping[str, object]] = [meta.crc32, meta.changed, meta.state_crc32]
    numbers.append({client: content.round_num for client, content in counted.items()})
    if any(type(number) is not int for table in numbers for number in table.values()):
        raise ValueError("a number is missing")
    if meta.crc32.keys() != meta.changed.keys():
        raise ValueError("its tables have different tensors")
    return meta
