"""``python -m tests.fuzz``: see the README beside this file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz import campaign
from tests.fuzz.hostile_servers import HOSTILE_SERVERS
from tests.fuzz.rpc import RPCS
from tests.fuzz.targets import CODEC, TARGETS

ATHERIS = "codec_atheris"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Fuzz every decoder and file reader."
    )
    parser.add_argument("--cases", type=int, default=10_000, help="of each target")
    parser.add_argument(
        "--codec-cases", type=int, help="of all targets of the codec together; 100 times --cases"
    )
    parser.add_argument("--targets", help="only these, with commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("fuzz.json"), help="write the table here too")
    parser.add_argument("--resume", action="store_true", help="leave out the targets that --json has already")
    options = parser.parse_args()
    names = options.targets.split(",") if options.targets else [*TARGETS, *RPCS, *HOSTILE_SERVERS, ATHERIS]
    codec = -(-(options.codec_cases or 100 * options.cases) // len(CODEC))
    results = campaign.from_json(options.json, options.seed) if options.resume else []
    known = {result.summary.target for result in results}
    for name in names:
        if name in known:
            continue
        before = campaign.cpu_seconds()
        if name == ATHERIS:
            result = campaign.run_atheris(10 * options.cases, options.seed)
        elif name in RPCS or name in HOSTILE_SERVERS:
            result = campaign.run_rpc(name, options.cases, options.seed)
        else:
            result = campaign.run_target(name, codec if name in CODEC else options.cases, options.seed)
        if result is None:
            print(f"{name}: not run, because atheris is not installed")
            continue
        result.summary.cpu_seconds = round(campaign.cpu_seconds() - before, 1)
        results.append(result)
        print(campaign.table(results[-1:]).splitlines()[1], flush=True)
        for finding in results[-1].findings:
            print(f"    case {finding.number}: {finding.error} at {finding.place}", flush=True)
        kept = campaign.keep(results[-1].findings)
        print(*(f"    kept as {path}" for path in kept), sep="\n", end="\n" if kept else "", flush=True)
        options.json.write_text(campaign.as_json(results, options.seed), encoding="utf-8")
    print(campaign.table(results))
    failed = [r.summary.target for r in results if not r.clean]
    if failed:
        print(f"these targets fail: {', '.join(failed)}; their cases are in tests/fuzz/corpus", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
