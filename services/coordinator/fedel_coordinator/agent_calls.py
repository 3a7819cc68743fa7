"""The calls about agents: list them, and what an operator does with one."""

from __future__ import annotations

from fedel.errors import ConfigError
from fedel.selectors import Selector
from fedel.v1 import coordinator_pb2 as pb
from fedel_coordinator.agent_view import agent_status, views
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.errors import NotNow

PAGE_BYTES = 1024 * 1024
"""Of one page of agents."""


def list_agents(coordinator: Coordinator, request: pb.ListAgentsRequest) -> pb.ListAgentsResponse:
    """A page; of one agent, with the trace of its last error."""
    answer = pb.ListAgentsResponse(now=coordinator.clock())
    if request.name:
        coordinator.fleet.row(request.name)
        answer.agents.extend(map(agent_status, views(coordinator, [request.name], with_trace=True)))
        return answer
    size, names = 0, coordinator.fleet.names(request.after)
    for view in views(coordinator, names, selector_of(request.selector)):
        status = agent_status(view)
        size += status.ByteSize()
        if answer.agents and size > PAGE_BYTES:
            answer.more = True
            break
        answer.agents.append(status)
    return answer


async def control_agent(coordinator: Coordinator, request: pb.ControlAgentRequest) -> pb.ControlAgentResponse:
    fleet = coordinator.fleet
    name = fleet.row(request.name).name
    if request.action == pb.AGENT_ACTION_LABEL:
        await fleet.label(name, dict(request.labels), set(request.dropped))
    elif request.action in (pb.AGENT_ACTION_CORDON, pb.AGENT_ACTION_UNCORDON):
        await fleet.cordon(name, request.action == pb.AGENT_ACTION_CORDON)
    elif request.action == pb.AGENT_ACTION_PROFILE:
        if not coordinator.sessions.is_open(name):
            raise NotNow(f"agent '{name}' is away: it can be asked to measure when it is connected")
        coordinator.sessions.push_to(name, pb.SessionResponse(profile=pb.ProfileAgain()))
    elif request.action == pb.AGENT_ACTION_FORGET:
        status = next(iter(views(coordinator, [name])))
        await fleet.forget(name)
        return pb.ControlAgentResponse(status=agent_status(status))
    else:
        raise ConfigError("no action: choose label, cordon, uncordon, profile or forget")
    await coordinator.settle_agent(name)
    return pb.ControlAgentResponse(status=agent_status(next(iter(views(coordinator, [name])))))


def selector_of(text: str) -> Selector:
    try:
        return Selector.parse(text)
    except ValueError as error:
        raise ConfigError(f"selector: {error}") from None
