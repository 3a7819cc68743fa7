"""What the store keeps as text: plans, states, reports, profiles and specs, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from google.protobuf import json_format

from fedel import config
from fedel.roles.coordinator import RunState
from fedel.types import ModelSpec, Plan, Report, TimingProfile
from fedel.v1 import model_pb2
from fedel.wire.codec import spec_from_pb, spec_to_pb


def spec_to_text(spec: ModelSpec) -> str:
    return str(json_format.MessageToJson(spec_to_pb(spec), indent=None))


def spec_from_text(text: str) -> ModelSpec:
    return spec_from_pb(json_format.Parse(text, model_pb2.ModelSpec()))


def state_to_text(state: RunState) -> str:
    return json.dumps(asdict(state))


def state_from_text(text: str) -> RunState:
    return config.parse(RunState, json.loads(text), "state of the run")


def plan_to_text(plan: Plan) -> str:
    """Without the global importance, which is the same in every task and stands in the run's state."""
    slim = replace(plan, tasks=tuple(replace(task, global_importance={}) for task in plan.tasks))
    return json.dumps(asdict(slim))


def plan_from_text(text: str, global_importance: Mapping[str, float]) -> Plan:
    plan = config.parse(Plan, json.loads(text), "plan of the round")
    return replace(plan, tasks=tuple(replace(task, global_importance=global_importance) for task in plan.tasks))


def report_to_text(report: Report) -> str:
    return json.dumps(asdict(report))


def profile_to_text(profile: TimingProfile) -> str:
    return json.dumps(asdict(profile))


def profile_from_text(text: str) -> TimingProfile:
    return config.parse(TimingProfile, json.loads(text), "timing profile")


def record_to_text(record: Mapping[str, Any]) -> str:
    """A line of ``rounds.jsonl``: what is not a finite number is ``null``, so that any JSON reader takes it."""
    return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
