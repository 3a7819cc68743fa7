"""The table of targets."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz.target import Target
from tests.fuzz.targets.agent_files import AGENT_FILES
from tests.fuzz.targets.aggregator_files import AGGREGATOR_FILES
from tests.fuzz.targets.certificates import CERTIFICATES
from tests.fuzz.targets.data_files import DATA_FILES
from tests.fuzz.targets.database import DATABASE
from tests.fuzz.targets.settings_and_records import SETTINGS_AND_RECORDS
from tests.fuzz.targets.wire import CODEC as CODEC
from tests.fuzz.targets.wire import WIRE

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        *WIRE,
        *AGGREGATOR_FILES,
        *AGENT_FILES,
        *CERTIFICATES,
        *SETTINGS_AND_RECORDS,
        *DATA_FILES,
        *DATABASE,
    )
}
