"""``fedel fleet``: the agents of a federation, whether they are in a run or not."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from rich.console import Console

from fedel.cli.agent_rows import details, labels_text, table_lines, to_table
from fedel.cli.certs import add_certs
from fedel.cli.run_actions import ADDRESS
from fedel.desk.submit import control_agent, list_agents
from fedel.errors import ConfigError
from fedel.roles.gate import clean
from fedel.security.tls import Tls
from fedel.serialisation import to_json
from fedel.v1 import coordinator_pb2 as pb

EXAMPLE = """example:
  fedel fleet --coordinator server:7070
  fedel fleet --selector gpu=orin,site!=lab
  fedel fleet show jetson-3                     # everything, with the traceback of its last error
  fedel fleet label jetson-3 site=roof gpu-     # set one label, drop another
  fedel fleet drain jetson-3                    # no new work; returns when it has finished what it has
  fedel fleet uncordon jetson-3
"""
ACTIONS = {
    "cordon": pb.AGENT_ACTION_CORDON,
    "uncordon": pb.AGENT_ACTION_UNCORDON,
    "drain": pb.AGENT_ACTION_CORDON,
    "profile": pb.AGENT_ACTION_PROFILE,
    "forget": pb.AGENT_ACTION_FORGET,
}
SAID = {
    "uncordon": "gets runs and tasks again",
    "profile": "is asked to measure its timing profiles again, as soon as it is idle",
    "forget": "is forgotten",
}
DRAINED, LOOK_SECONDS = "drained", 1.0


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "fleet",
        description="The agents that a coordinator knows. cordon: no new run, no task from the next round on;"
        " drain: cordon, and wait until the agent has finished its task; profile: measure the timing profiles"
        " again in idle time; forget: remove an agent that is gone from the list. docs/fleet.md has more.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=["list", "show", "label", *ACTIONS], default="list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="agents; for label, one agent and its labels")
    parser.add_argument("--selector", default="", metavar="LABELS", help="agents with these labels")
    parser.add_argument("--coordinator", default=ADDRESS, metavar="HOST:PORT", help=f"default: {ADDRESS}")
    add_certs(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    action, names = arguments.action, arguments.names
    if action == "list":
        if names:
            raise ConfigError(
                f"`fedel fleet list` takes no names; `fedel fleet show {names[0]}` shows one agent"
            )
        asyncio.run(_list(arguments))
    elif action == "show":
        asyncio.run(_show(arguments))
    elif action == "label":
        asyncio.run(_label(arguments))
    else:
        _control(arguments)
    return 0


def _tls(arguments: argparse.Namespace) -> Tls:
    return Tls.of_user(arguments.certs)


async def _list(arguments: argparse.Namespace) -> None:
    agents, now = await list_agents(arguments.coordinator, arguments.selector, tls=_tls(arguments))
    if arguments.json:
        print(to_json([to_table(agent) for agent in agents]))
        return
    if not agents:
        told = f"no agent has these labels: {clean(arguments.selector)}" if arguments.selector else NOBODY
        print(told)
        return
    console = Console()
    for line in table_lines(agents, now, console.width if console.is_terminal else 0):
        print(line)
    here = sum(agent.connected for agent in agents)
    print(f"{len(agents)} agent{'s'[: len(agents) > 1]}, {here} connected")


NOBODY = "no agent has connected yet; docs/fleet.md tells how to start one"


async def _show(arguments: argparse.Namespace) -> None:
    if len(arguments.names) != 1:
        raise ConfigError("`fedel fleet show` needs the name of one agent; `fedel fleet` lists them")
    found, now = await list_agents(arguments.coordinator, name=arguments.names[0], tls=_tls(arguments))
    print(to_json(to_table(found[0])) if arguments.json else details(found[0], now))


async def _label(arguments: argparse.Namespace) -> None:
    name, *words = arguments.names or [""]
    if not name or not words:
        raise ConfigError("write it as `fedel fleet label NAME key=value`, or `key-` to drop a label")
    labels, dropped = parse_labels(words)
    request = pb.ControlAgentRequest(
        name=name, action=pb.AGENT_ACTION_LABEL, labels=labels, dropped=sorted(dropped)
    )
    status = await control_agent(arguments.coordinator, request, _tls(arguments))
    said = f"{clean(status.name)}: {clean(labels_text(status.labels))}"
    print(to_json(to_table(status)) if arguments.json else said)


def parse_labels(words: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Labels to set, and keys of those to drop.

    >>> parse_labels(["gpu=orin", "site-"])
    ({'gpu': 'orin'}, {'site'})
    """
    labels, dropped = {}, set[str]()
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            labels[key] = value
        elif word.endswith("-"):
            dropped.add(word[:-1])
        else:
            raise ConfigError(f"label {word!r}: write key=value to set it, or key- to drop it")
    return labels, dropped


def _control(arguments: argparse.Namespace) -> None:
    names, action = arguments.names, arguments.action
    if not names and not arguments.selector:
        raise ConfigError(f"`fedel fleet {action}` needs the names of agents, or --selector")
    try:
        asyncio.run(_each(arguments, names))
    except KeyboardInterrupt:
        if action != "drain":
            raise
        told = "they stay cordoned and finish their tasks; `fedel fleet` shows when, `uncordon` gives them back"
        raise KeyboardInterrupt(told) from None


async def _each(arguments: argparse.Namespace, names: list[str]) -> None:
    address, tls, action = arguments.coordinator, _tls(arguments), arguments.action
    if arguments.selector:
        agents, _ = await list_agents(address, arguments.selector, tls=tls)
        names = [*names, *(agent.name for agent in agents if agent.name not in names)]
    found = []
    for name in names:
        request = pb.ControlAgentRequest(name=name, action=ACTIONS[action])
        found.append(await control_agent(address, request, tls))
        if not arguments.json:
            print(f"{clean(name)} {SAID.get(action) or _cordoned(found[-1])}", flush=True)
    if action == "drain":
        found = [await _drained(address, agent, arguments.json, tls) for agent in found]
    if arguments.json:
        print(to_json([to_table(agent) for agent in found]))


def _cordoned(agent: pb.AgentStatus) -> str:
    """As the coordinator sees it right after the change."""
    if agent.state == DRAINED:
        return "is cordoned and drained: it has no task, and can be stopped"
    runs = f" of {', '.join(map(clean, agent.runs))}" if agent.runs else ""
    return f"is cordoned, and still works on a task{runs}"


async def _drained(address: str, agent: pb.AgentStatus, is_quiet: bool, tls: Tls) -> pb.AgentStatus:
    """Look again until the agent has nothing more to do, or somebody gives it back."""
    was_drained = agent.state == DRAINED
    while agent.state != DRAINED:
        await asyncio.sleep(LOOK_SECONDS)
        (agent,), _ = await list_agents(address, name=agent.name, tls=tls)
        if not agent.cordoned:
            raise ConfigError(f"agent '{clean(agent.name)}' was uncordoned by somebody else: it is not drained")
    if not was_drained and not is_quiet:
        print(f"{clean(agent.name)} is drained: it has no task, and can be stopped", flush=True)
    return agent
