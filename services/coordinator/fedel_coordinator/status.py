"""A shown run as protobuf, for ``fedel status`` and those who follow a run over gRPC."""

from __future__ import annotations

from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import task_pb2
from fedel_coordinator.messages import PHASES
from fedel_coordinator.run_view import ClientView, RunView


def run_status(view: RunView, now: float) -> pb.RunStatus:
    """Without the clients."""
    open_round = view.open_round
    return pb.RunStatus(
        run=view.run,
        config_json=view.config_json,
        phase=PHASES[view.phase],
        message=view.message,
        round_num=open_round.round_num if open_round else view.rounds_closed,
        num_rounds=view.num_rounds,
        budget_seconds=view.budget_seconds,
        round_phase=open_round.phase if open_round else "waiting",
        round_seconds=max(0.0, now - open_round.opened_at) if open_round else 0.0,
        model_version=view.rounds_closed,
        created_at=view.created_at,
        num_clients=view.num_clients,
        num_connected=view.num_connected,
    )


def client_status(client: ClientView) -> pb.ClientStatus:
    end, front = client.window or (0, 0)
    return pb.ClientStatus(
        client=client.client,
        device_type=client.device_type,
        connected=client.connected,
        silent_seconds=client.silent_seconds,
        phase=client.phase,
        # Without the names of its tensors: they are in the round's record, and a fleet has many.
        window=task_pb2.WindowState(
            end_block=end, front_block=front, resets=client.resets, rounds_held=client.rounds_held
        ),
        train_seconds=client.train_seconds or 0.0,
        counted_seconds=client.counted_seconds or 0.0,
        budget_seconds=client.budget_seconds or 0.0,
        bytes_up=client.bytes_up,
        bytes_down=client.bytes_down,
    )
