"""The updates of closed rounds stay on disk for an audit, for as many rounds as the setting says."""

from pathlib import Path

import pytest
from fedel_aggregator.config import AggregatorConfig

from tests.services.aggregator.support import aggregator, asynchronous, close, create, make_update, send


async def rounds(stub, first, last):
    for round_num in range(first, last):
        for client in ("a", "b"):
            await send(stub, make_update(client, round_num))
        await close(stub, round_num)


def kept(folder: Path) -> dict[str, set[str]]:
    found = sorted((folder / "runs" / "run" / "updates").glob("*"))
    return {path.name: {file.name for file in path.iterdir()} for path in found}


def versions(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "runs" / "run" / "versions").glob("*.json"))


@pytest.mark.parametrize(
    ("keep", "expected_rounds", "expected_versions"),
    [
        (0, [], [7, 8]),
        (1, [7], [7, 8]),
        (3, [3, 4, 5, 6, 7], [3, 6, 7, 8]),
        (-1, [0, 1, 2, 3, 4, 5, 6, 7], [0, 7, 8]),
    ],
)
@asynchronous
async def test_keeps_rounds_and_the_versions_they_begin_with(
    tmp_path, keep, expected_rounds, expected_versions
):
    async with aggregator(tmp_path, keep_updates=keep) as (stub, _):
        await create(stub)
        await rounds(stub, 0, 2)
    async with aggregator(tmp_path, keep_updates=keep) as (stub, _):
        await rounds(stub, 2, 8)
    files = {"a.update", "b.update", "version.json"}
    assert [f"{number:06d}" for number in expected_rounds] == list(kept(tmp_path))
    assert all(files <= found for found in kept(tmp_path).values())
    assert [f"{number:06d}" for number in expected_versions] == versions(tmp_path)


@asynchronous
async def test_may_begin_in_the_middle_of_a_run(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await rounds(stub, 0, 4)
    async with aggregator(tmp_path, keep_updates=-1) as (stub, _):
        await rounds(stub, 4, 8)
    assert ["000004", "000005", "000006", "000007"] == list(kept(tmp_path))
    assert ["000004", "000007", "000008"] == versions(tmp_path)


def test_setting_is_a_number_of_rounds():
    with pytest.raises(ValueError, match="-1 for all"):
        AggregatorConfig(keep_updates=-2)
