"""Memory and energy: measured peak memory of training steps, and watts times virtual seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from fedel.errors import ConfigError
from fedel.experiments import memory, pictures
from fedel.experiments.outcomes import Outcome, Outcomes, mean
from fedel.experiments.scale import Power, overlaid
from fedel.experiments.sections import Picture, Row, Section, Table, Verdict, shown
from fedel.experiments.stats import FAILS, HOLDS, UNKNOWN, Estimate, at_least

MEASURED = ("fedavg", "elastictrainer", "fedel")
"""Methods whose steps follow from the selection; the others change the network itself."""


def analyse(section: Section, outcomes: Outcomes, paper: Mapping[str, Any]) -> None:
    power = outcomes.scale.power
    section.notes += [
        "Memory: the weights and the peak that training adds, measured on this machine, for the windows and "
        f"selections that a device type used most often (up to {memory.MOST_USED}, weighted by frequency).",
        "Energy: there is no sensor, so it is computed: virtual seconds (whole step) in which a device trains, "
        "or waits for the end of the round, times watts: "
        + "; ".join(f"{kind} {p.busy:g} busy, {p.idle:g} idle" for kind, p in power.items())
        + f". Source: {outcomes.scale.power_source or 'not given'}.",
    ]
    for task in outcomes.tasks:
        _memory(section, outcomes, task, paper)
        _energy(section, outcomes, task, paper)


def _memory(section: Section, outcomes: Outcomes, task: str, paper: Mapping[str, Any]) -> None:
    found = [o for label in MEASURED if (o := outcomes.first(task, label)) is not None]
    job = overlaid(found[0].plan.table, outcomes.scale.tasks[task].memory) if found else {}
    steps = [used for outcome in found for used in memory.used_steps(outcome)]
    used = memory.measured(steps, job, found[0].report.path.parent) if steps else []
    fedavg = [u for u in used if u.method == "fedavg"]
    whole = memory.mean_peak(fedavg) if fedavg else math.nan
    rows: list[Row] = []
    for method, device in dict.fromkeys((u.method, u.device) for u in used):
        peaks = [u for u in used if (u.method, u.device) == (method, device)]
        rows.append(
            {
                "method": method,
                "device": device,
                "MB": memory.mean_peak(peaks) / 1e6,
                "largest MB": max(u.peak_bytes for u in peaks) / 1e6,
                "less than FedAvg %": 100 * (1 - memory.mean_peak(peaks) / whole),
                "at most %": 100 * (1 - min(u.peak_bytes for u in peaks) / whole),
            }
        )
    saved = [row["at most %"] for row in rows if row["method"] == "fedel"]
    lowest = max(saved, default=None) if fedavg else None  # measured once, and there is no chance in it
    title = outcomes.scale.tasks[task].title
    if rows:
        section.tables.append(Table(f"{title}: memory of a training step", dict.fromkeys(rows[0], 1), rows))
    printed = paper["memory_reduction_percent"]
    claim = f"{title}: FedEL needs up to {printed} % less memory than FedAvg"
    answer = UNKNOWN if lowest is None else HOLDS if lowest >= printed else FAILS
    section.verdicts.append(Verdict(claim, answer, f"up to {shown(lowest)} %"))


def _energy(section: Section, outcomes: Outcomes, task: str, paper: Mapping[str, Any]) -> None:
    power = outcomes.scale.power
    rows: list[Row] = []
    reductions: dict[str, dict[str, Estimate]] = {}
    for label in outcomes.labels(task):
        pairs = outcomes.pairs(task, label, "fedavg")
        saved = mean(100 * (1 - joules(a, power) / joules(b, power)) for a, b in pairs)
        rows.append(
            {
                "method": label,
                "kJ": outcomes.mean(task, label, lambda o: joules(o, power) / 1e3),
                "W, mean": outcomes.mean(task, label, lambda o: _watts(o, power)),
                "less than FedAvg %": saved,
                "paper's %": paper["energy_reduction_percent"] if label == "fedel" else None,
            }
        )
        if saved is not None and label != "fedavg":
            reductions[label] = {"energy": saved}
    title = outcomes.scale.tasks[task].title
    if rows:
        section.tables.append(Table(f"{title}: energy of all devices", dict.fromkeys(rows[0], 2), rows))
    if reductions:
        drawn = pictures.bars(reductions, "energy less than FedAvg (%)", paper["energy_reduction_percent"])
        caption = f"{title}: energy saved; dashed: the paper's number for FedEL."
        section.pictures.append(Picture(f"resources-{task}", caption, drawn))
    found = reductions.get("fedel", {}).get("energy")
    printed = paper["energy_reduction_percent"]
    claim = f"{title}: FedEL needs about half of FedAvg's energy (paper: {printed} % less)"
    section.verdicts.append(Verdict(claim, at_least(found, 40), f"{shown(found)} % less"))


def joules(outcome: Outcome, power: Mapping[str, Power]) -> float:
    """Energy of all clients in all their rounds; the whole step counts."""
    total = 0.0
    for record in outcome.report.rounds:
        latency = record.clock_seconds["train"]
        for entry in record.clients:
            watts = _of(power, entry.device_type)
            busy = min(entry.clock_seconds["train"], latency)
            total += watts.busy * busy + watts.idle * (latency - busy)
    return total


def _watts(outcome: Outcome, power: Mapping[str, Power]) -> float:
    """Mean power of a device while it trains: the same for all methods, as in the paper."""
    kinds = [entry.device_type for record in outcome.report.rounds for entry in record.clients]
    return statistics.fmean(_of(power, kind).busy for kind in kinds)


def _of(power: Mapping[str, Power], kind: str) -> Power:
    if kind not in power:
        raise ConfigError(f"the scale's [power] has no device type '{kind}'; add its busy and idle watts")
    return power[kind]
