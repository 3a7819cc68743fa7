"""Code of jobs in the coordinator's database."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fedel_services.job_code import KEPT_SECONDS, load
from google.protobuf.message import DecodeError

from fedel.errors import ConfigError
from fedel.job_code import JobCode
from fedel.serialisation import parse_json
from fedel.v1.code_pb2 import StoredCode
from fedel_coordinator.store import CodeRow, RunRow, Store


class StoreShelf:
    """A row for each code."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, code: StoredCode) -> None:
        self._store.put_code(CodeRow(code.header.sha256, code.SerializeToString(), time.time()))

    def get(self, sha256: str) -> StoredCode | None:
        row = self._store.code(sha256)
        try:
            return StoredCode.FromString(row.content) if row else None
        except DecodeError:
            raise ConfigError(
                f"the job's code {sha256[:12]} is damaged in the database: use a backup"
            ) from None


def code_of(store: Store, run: str, config_json: str) -> JobCode | None:
    """The code that a run names in its configuration; ``run`` tells its modules from others. Blocks."""
    return load(StoreShelf(store), _hash_in(config_json), f"coordinator {run}")


def drop_unused(store: Store, rows: Iterable[RunRow]) -> None:
    """Code that no run names; that of a run that is just being created is new. Blocks."""
    store.drop_codes({_hash_in(row.config_json) for row in rows}, time.time() - KEPT_SECONDS)


def _hash_in(config_json: str) -> str:
    try:
        return str(parse_json(config_json).get("bundle", ""))
    except (ValueError, AttributeError):
        return ""  # its parser says what is wrong with it
