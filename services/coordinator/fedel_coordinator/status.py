"""How runs stand, for people who watch them."""

from __future__ import annotations

import json

from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import task_pb2
from fedel_coordinator.members import Member
from fedel_coordinator.run import PHASES, Run
from fedel_coordinator.store import COMMITTED, OPEN, SEALED, RunRow

ROUND_PHASES = {OPEN: "train", SEALED: "fold", COMMITTED: "evaluate"}


def live(run: Run) -> pb.RunStatus:
    """Of a run that this process drives."""
    now = run.round
    budgets = [task.budget_seconds for task in now.plan.tasks] if now else []
    return pb.RunStatus(
        run=run.name,
        config_json=run.row.config_json,
        phase=PHASES[run.phase],
        message=run.notice or run.message,
        round_num=now.round_num if now else run.state.round_num,
        num_rounds=run.config.rounds.num_rounds,
        budget_seconds=budgets[0] if budgets else run.last_record.get("budget_seconds", 0.0),
        round_phase=ROUND_PHASES[now.status] if now else "waiting",
        round_seconds=max(0.0, run.tools.clock() - now.opened_at) if now else 0.0,
        model_version=run.state.round_num,
        clients=[_client(run, member) for member in run.members],
        created_at=run.row.created_at,
    )


def stored(row: RunRow) -> pb.RunStatus:
    """Of a run that ended before this process began."""
    return pb.RunStatus(
        run=row.name,
        config_json=row.config_json,
        phase=PHASES[row.phase],
        message=row.message,
        round_num=row.model_version,
        num_rounds=json.loads(row.config_json)["rounds"]["num_rounds"],
        model_version=row.model_version,
        created_at=row.created_at,
    )


def _client(run: Run, member: Member) -> pb.ClientStatus:
    client, window = member.row.client, member.window
    return pb.ClientStatus(
        client=client,
        device_type=member.row.device_type,
        connected=run.tools.fleet.ready(client, run.name),
        silent_seconds=run.tools.fleet.silent_for(client),
        phase=member.phase,
        # Without the names of its tensors: they stand in the round's record, and a fleet has many.
        window=task_pb2.WindowState(
            end_block=window.end_block,
            front_block=window.front_block,
            resets=window.resets,
            rounds_held=window.rounds_held,
        ),
        train_seconds=member.train_seconds,
        budget_seconds=member.budget_seconds,
        bytes_up=member.bytes_up,
        bytes_down=member.bytes_down,
    )
