"""``fedel chaos``: drills against a federation of its own, and the soak."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from pathlib import Path

from fedel.chaos.drill import draw, not_covered, run_drill
from fedel.chaos.federation import Layout, database_for
from fedel.chaos.soak import Soak, run_soak
from fedel.chaos.verdict import Outcome
from fedel.serialisation import to_json

EXAMPLE = """examples:
  fedel chaos --seed 7
  fedel chaos --drills 200 --database postgresql
  fedel chaos --minutes 60 --agents 50 --fault-every 20

exit code: 0 if every drill was sound, 1 if not
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "chaos",
        description="Start a federation on this machine and disturb it: kill and freeze processes, cut, delay, "
        "throttle and damage links, fill disks, restart the database, move clocks. Then check that no "
        "acknowledged update is lost, none counts twice, nothing hangs, and the model has the bits of an "
        "undisturbed run.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first drill; decides everything (default: 1)"
    )
    parser.add_argument("--drills", type=int, default=1, help="how many, with this seed and the next ones")
    parser.add_argument("--agents", type=int, default=3, help="number of agents (default: 3)")
    parser.add_argument("--aggregators", type=int, default=0, help="number of them (default: the seed decides)")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--minutes", type=float, default=0.0, help="instead of drills, one run of this length")
    parser.add_argument("--fault-every", type=float, default=20.0, metavar="SECONDS", help="with --minutes")
    parser.add_argument("--out", type=Path, help="keep all files here (default: only those of unsound drills)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    outcomes = _soak(arguments) if arguments.minutes else _drills(arguments)
    if arguments.json:
        print(to_json(outcomes))
    return 0 if all(outcome.sound for outcome in outcomes) else 1


def _folder(arguments: argparse.Namespace, seed: int) -> Path:
    if arguments.out is None:
        return Path(tempfile.mkdtemp(prefix=f"fedel-chaos-{seed}-"))
    folder: Path = arguments.out.absolute() / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _drills(arguments: argparse.Namespace) -> list[Outcome]:
    outcomes = []
    with database_for(Layout(database=arguments.database)) as database:
        for seed in range(arguments.seed, arguments.seed + arguments.drills):
            folder = _folder(arguments, seed)
            drill = draw(seed, arguments.agents, arguments.aggregators, arguments.database)
            if not arguments.json:
                print(drill, flush=True)
            outcome = asyncio.run(run_drill(drill, folder, database))
            _keep(arguments, folder, outcome)
            outcomes.append(outcome)
            if not arguments.json:
                _show(outcome)
    if not arguments.json:
        _summary(arguments, outcomes)
    return outcomes


def _keep(arguments: argparse.Namespace, folder: Path, outcome: Outcome) -> None:
    if outcome.sound and arguments.out is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        outcome.folder = str(folder)


def _show(outcome: Outcome) -> None:
    for line in outcome.timeline:
        print(f"  {line}")
    print(
        f"  {outcome.num_rounds} rounds, {outcome.num_faults} faults, {outcome.num_acknowledged} updates "
        f"acknowledged, {outcome.num_counted} counted, {outcome.num_recomputed} versions computed again, "
        f"{outcome.seconds:.1f} s"
    )
    for problem in outcome.problems:
        print(f"  {problem}")
    where = f"; its files: {outcome.folder}" if outcome.folder else ""
    print(f"  {'sound' if outcome.sound else 'NOT SOUND'}{where}", flush=True)


def _summary(arguments: argparse.Namespace, outcomes: list[Outcome]) -> None:
    layout = draw(arguments.seed, arguments.agents, arguments.aggregators, arguments.database).layout
    for line in sorted({*not_covered(layout), *(line for o in outcomes for line in o.not_covered)}):
        print(f"not covered: {line}")
    if len(outcomes) > 1:
        bad = [str(outcome.seed) for outcome in outcomes if not outcome.sound]
        faults, seconds = sum(o.num_faults for o in outcomes), sum(o.seconds for o in outcomes)
        said = f"not sound: seeds {', '.join(bad)}" if bad else "all sound"
        print(f"{len(outcomes)} drills, {faults} faults, {seconds / 60:.1f} minutes: {said}")


def _soak(arguments: argparse.Namespace) -> list[Outcome]:
    soak = Soak(
        seed=arguments.seed,
        minutes=arguments.minutes,
        num_agents=arguments.agents,
        num_aggregators=arguments.aggregators or 1,
        database=arguments.database,
        fault_every=arguments.fault_every,
    )
    folder = _folder(arguments, arguments.seed)
    say = (lambda _: None) if arguments.json else (lambda line: print(line, flush=True))
    with database_for(soak.layout) as database:
        outcome = asyncio.run(run_soak(soak, folder, say, database))
    _keep(arguments, folder, outcome)
    if not arguments.json:
        outcome.timeline.clear()  # each line was printed when it happened
        _show(outcome)
    return [outcome]
