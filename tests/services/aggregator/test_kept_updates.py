"""The updates of closed rounds stay on disk for an audit, for as many rounds as the setting says."""

from pathlib import Path

import pytest
from fedel_aggregator.config import AggregatorConfig

from tests.services.aggregator.support import aggregator, asynchronous, close, create, make_update, send


async def rounds(stub, first, last):
    for round_num in range(first, last):
        for client in ("ann", "bob"):
            await send(stub, make_update(client, round_num))
        await close(stub, round_num)


def kept(folder: Path) -> dict[str, list[str]]:
    found = sorted((folder / "runs" / "run" / "updates").glob("*"))
    return {path.name: sorted(file.name for file in path.iterdir()) for path in found}


def versions(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "runs" / "run" / "versions").glob("*.json"))


@pytest.mark.parametrize(
    ("keep", "expected_rounds", "expected_versions"),
    [
        (0, [], ["000003", "000004"]),
        (2, ["000002", "000003"], ["000002", "000003", "000004"]),
        (-1, ["000000", "000001", "000002", "000003"], ["000000", "000003", "000004"]),
    ],
)
@asynchronous
async def test_keeps_rounds_and_the_version_they_begin_with(tmp_path, keep, expected_rounds, expected_versions):
    async with aggregator(tmp_path, keep_updates=keep) as (stub, _):
        await create(stub)
        await rounds(stub, 0, 2)
    async with aggregator(tmp_path, keep_updates=keep) as (stub, _):
        await rounds(stub, 2, 4)
    files = ["ann.update", "bob.update", "sealed", "version.json"]
    assert dict.fromkeys(expected_rounds, files) == kept(tmp_path)
    assert expected_versions == versions(tmp_path)


def test_setting_is_a_number_of_rounds():
    with pytest.raises(ValueError, match="-1 for all"):
        AggregatorConfig(keep_updates=-2)
