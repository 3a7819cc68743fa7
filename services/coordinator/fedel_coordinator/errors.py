"""Why the coordinator refuses a call, and the gRPC status of each reason."""

from __future__ import annotations

import grpc
from fedel_services.errors import Status, Statuses

from fedel.errors import ServiceError
from fedel_coordinator.store import StoreUnavailable


class NameTaken(ServiceError):
    """Another run has the name."""


class ModelMissing(ServiceError):
    """An aggregator does not hold the run's first model."""


class AggregatorAway(ServiceError):
    """An aggregator does not answer."""


class NoSuchRun(ServiceError):
    """There is no run of this name."""


class RunEnded(ServiceError):
    """The run is over or about to be; it cannot be paused or resumed."""


class RunActive(ServiceError):
    """The run is not over."""


class SessionReplaced(ServiceError):
    """A newer session of the same client took over."""


class SessionSilent(ServiceError):
    """A new session did not say who it is, or nothing came from one for too long."""


class SessionAbused(ServiceError):
    """A session sent too much, or did not read what was sent to it."""


class WrongProtocol(ServiceError):
    """The agent's version and this one do not work together."""


class NoSuchAgent(ServiceError):
    """There is no agent of this name."""


class NotNow(ServiceError):
    """Nothing can be done with the agent while it is here, or away."""


class FleetFull(ServiceError):
    """No more agents are remembered."""


class Stopping(ServiceError):
    """This process is about to stop."""


STATUSES: Statuses = {
    NameTaken: Status(grpc.StatusCode.ALREADY_EXISTS, "exists"),
    ModelMissing: Status(grpc.StatusCode.FAILED_PRECONDITION, "no_model"),
    AggregatorAway: Status(grpc.StatusCode.UNAVAILABLE, "aggregator"),
    NoSuchRun: Status(grpc.StatusCode.NOT_FOUND, "unknown_run"),
    RunEnded: Status(grpc.StatusCode.FAILED_PRECONDITION, "ended"),
    RunActive: Status(grpc.StatusCode.FAILED_PRECONDITION, "active"),
    SessionReplaced: Status(grpc.StatusCode.ALREADY_EXISTS, "superseded"),
    SessionSilent: Status(grpc.StatusCode.DEADLINE_EXCEEDED, "silent"),
    SessionAbused: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "session"),
    WrongProtocol: Status(grpc.StatusCode.FAILED_PRECONDITION, "protocol"),
    NoSuchAgent: Status(grpc.StatusCode.NOT_FOUND, "unknown_agent"),
    NotNow: Status(grpc.StatusCode.FAILED_PRECONDITION, "not_now"),
    FleetFull: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "agents"),
    Stopping: Status(grpc.StatusCode.UNAVAILABLE, "stopping"),
    StoreUnavailable: Status(grpc.StatusCode.UNAVAILABLE, "store"),
}
