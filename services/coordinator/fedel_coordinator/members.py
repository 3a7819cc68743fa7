"""The clients that joined a run: what a plan may know of them, and how each fares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fedel.core.timing import full_step
from fedel.types import ClientView, ModelSpec, TimingProfile
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import task_pb2
from fedel.wire.codec import profile_from_pb
from fedel_coordinator.fleet import Device, Fleet
from fedel_coordinator.saved import profile_from_text, profile_to_text
from fedel_coordinator.store import ClientRow


@dataclass
class Member:
    """One client of one run; what follows the view is for people to watch."""

    row: ClientRow
    view: ClientView
    phase: str = "idle"
    window: task_pb2.WindowState = field(default_factory=task_pb2.WindowState)
    train_seconds: float = 0.0
    budget_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


class Members:
    """Every client that ever joined the run, by name: plans need a fixed order."""

    def __init__(self, fleet: Fleet, rows: list[ClientRow]) -> None:
        self._fleet = fleet
        self._members = {row.client: Member(row, _view(row)) for row in rows}

    def __iter__(self) -> Iterator[Member]:
        return (self._members[name] for name in sorted(self._members))

    def get(self, client: str) -> Member | None:
        return self._members.get(client)

    def device_type(self, client: str) -> str:
        member = self._members.get(client)
        return member.row.device_type if member else ""

    def put(self, row: ClientRow) -> None:
        """A client joined, or joined again."""
        member = self._members.get(row.client)
        if member is None:
            self._members[row.client] = Member(row, _view(row))
        else:
            member.row, member.view = row, _view(row)

    def leave(self, client: str) -> None:
        """The client takes part no more, until it joins again."""
        if member := self._members.get(client):
            member.row = replace(member.row, has_left=True)
            member.phase = "idle"

    def present(self) -> list[Member]:
        """Those that can be planned for."""
        return [m for m in self if not m.row.has_left and self._fleet.present(m.row.client)]

    def evaluators(self) -> list[str]:
        """Those that hold test data, the fastest first."""
        able = [m for m in self.present() if m.row.can_evaluate]
        return [m.row.client for m in sorted(able, key=lambda m: full_step(m.view.profile).total("train"))]


def row_of(run: str, client: str, device: Device, join: pb.Join, last_seen: float) -> ClientRow:
    return ClientRow(
        run=run,
        client=client,
        device_type=device.device_type,
        memory_bytes=device.memory_bytes,
        agent_version=device.agent_version,
        num_samples=join.num_samples,
        can_evaluate=join.can_evaluate,
        profile_json=profile_to_text(profile_from_pb(join.profile)),
        last_seen=last_seen,
    )


def objection(join: pb.Join, spec: ModelSpec) -> str:
    """Why a client cannot join, for people; empty if it can."""
    if join.model_digest != spec.digest:
        return (
            f"the agent built a model with the digest '{join.model_digest}', run '{join.run}' trains"
            f" '{spec.digest}' ({spec.name}): install the same version of FedEL and of the model's code"
        )
    if join.num_samples < 1:
        return f"the agent holds {join.num_samples} training samples: give it some in its [data] section"
    return _objection_to_profile(profile_from_pb(join.profile), spec)


def _objection_to_profile(profile: TimingProfile, spec: ModelSpec) -> str:
    """Every plan reads every profile, so that one bad profile would stop the run for all."""
    if len(profile.blocks) != spec.num_blocks or set(profile.by_name) != {t.name for t in spec.weights}:
        return (
            f"the agent's timing profile of {len(profile.blocks)} blocks and {len(profile.tensors)} tensors is"
            f" not of model '{spec.name}' ({spec.num_blocks} blocks, {len(spec.weights)} weights): profile anew"
        )
    seconds = [s for t in profile.tensors for s in (t.grad_seconds, t.update_seconds)]
    seconds += [b.forward_seconds for b in profile.blocks]
    if not all(math.isfinite(s) and s >= 0 for s in seconds) or sum(seconds) <= 0:
        return "the agent's timing profile holds times that are no positive numbers: profile anew"
    return ""


def _view(row: ClientRow) -> ClientView:
    return ClientView(row.client, row.num_samples, profile_from_text(row.profile_json))
