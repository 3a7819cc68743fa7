"""``fedel bench``: measure FedEL on this machine, beside other systems and the machine's limits."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedel.bench import page, runner
from fedel.bench.section import Options, sections

OUT, QUICK_OUT = Path("runs/bench"), Path("runs/bench-quick")
EXAMPLE = """examples:
  fedel bench --quick
  fedel bench --sections systems --sizes M --clients 10
  fedel bench --page docs/performance.md

After Ctrl-C the same command goes on where it was; --again starts over.
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "bench",
        description="Measure what FedEL costs on this machine: CPU, memory, bytes and seconds per round, "
        "beside other systems (installed from PyPI into a cache) and beside the least that the machine can do.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Options()
    parser.add_argument("--quick", action="store_true", help="FedEL and the limits only, in three minutes")
    parser.add_argument("--sections", type=_words, default=(), metavar="A,B", help="default: all")
    parser.add_argument(
        "--sizes", type=_words, default=default.sizes, metavar="S,M,L", help="models: 1, 60, 528 MB"
    )
    parser.add_argument(
        "--clients", type=_numbers, default=default.clients, metavar="2,10", help="clients per round"
    )
    parser.add_argument("--systems", type=_words, default=(), metavar="A,B", help="default: all")
    parser.add_argument(
        "--turns", type=int, default=default.turns, help="measurements of each system (default: 2)"
    )
    parser.add_argument(
        "--seconds", type=float, default=default.seconds, help="limit for one of them (default: 300)"
    )
    parser.add_argument("--out", type=Path, help=f"folder of the figures (default: {OUT})")
    parser.add_argument("--again", action="store_true", help="forget what was measured before in that folder")
    parser.add_argument("--page", type=Path, help="write the page here (default: bench.md in that folder)")
    parser.set_defaults(run=main)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))


def main(arguments: argparse.Namespace) -> int:
    given = ("quick", "sizes", "clients", "systems", "turns", "seconds")
    options = Options(**{name: getattr(arguments, name) for name in given})
    chosen = sections(arguments.sections, quick=options.quick)
    out: Path = arguments.out or (QUICK_OUT if options.quick else OUT)
    if arguments.again or options.quick:
        (out / runner.FILE).unlink(missing_ok=True)
    try:
        rows = runner.run(chosen, options, out, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; what was measured is in {out}, the same command goes on") from None
    file = arguments.page or out / "bench.md"
    page.write(rows, sections(), file)
    print(f"{file} has the result, {out / runner.FILE} every figure")
    return 0
