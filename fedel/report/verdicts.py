"""What a report says first, in sentences. Each holds for the curves as a whole, not for a lucky test."""

from __future__ import annotations

from collections.abc import Sequence

from fedel.report import curves
from fedel.report.figures import labels
from fedel.report.refusals import reasons
from fedel.report.runs import StoredRun
from fedel.report.words import clock, clocks_note, duration, percent, plural, same_clock


def verdicts(runs: Sequence[StoredRun]) -> list[str]:
    """The result, then what stands in its way; the first run is compared with each of the others."""
    named = list(zip(labels(runs), runs, strict=True))
    sentences = [_headline(named)]
    sentences += [sentence for label, run in named for sentence in _troubles(label, run)]
    if len(runs) > 1 and not same_clock(runs):
        return [*sentences, clocks_note(runs)]
    for other in named[1:]:
        # To be fast is nothing where nothing is learned; and a run at chance reaches low targets by luck.
        if not named[0][1].is_at_chance and not other[1].is_at_chance:
            sentences += _pace(named[0], other)
            sentences += _time_to_target(named[0], other)
    return sentences


Named = tuple[str, StoredRun]


def _headline(named: Sequence[Named]) -> str:
    runs = [run for _, run in named]
    if len(runs) > 1 and same_clock(runs) and all(run.rounds for run in runs):
        seconds = min(run.seconds()[-1] for run in runs)
        each = ", ".join(f"{label} {_tested(curves.late_mean(run.tests(), seconds))}" for label, run in named)
        return f"After the same time ({_time(seconds, runs[0])}): {each}."
    return " ".join(_alone(label, run) for label, run in named)


def _alone(label: str, run: StoredRun) -> str:
    if not run.rounds:
        said = run.result.message if run.result else ""
        return f"{label}: no round is closed{f' ({run.phase}: {said})' if said else ''}."
    means = run.means()
    how = f" (mean of the last {len(means[-curves.IN_A_ROW :])} tests)" if len(means) > 1 else ""
    after = f"after {plural(len(run.rounds), 'round')}, {_time(run.seconds()[-1], run)}"
    return f"{label}: {_tested(means[-1] if means else None)}{how} {after}."


def _troubles(label: str, run: StoredRun) -> list[str]:
    sentences = []
    classes = run.num_classes
    if run.is_at_chance and classes:
        chance = f"{percent(1 / classes)} is chance for {classes} classes"
        best = max(run.means())
        sentences.append(
            f"{label} has not learned: {chance}."
            if curves.is_at_chance(best, classes)
            else f"{label} has lost what it learned ({percent(best)} at its best): {chance}."
        )
    empty = [record for record in run.rounds if record.num_tasks and not record.num_updates]
    found = reasons(run.rounds)
    if found and empty:
        which = "any round" if len(empty) == len(run.rounds) else f"{len(empty)} of {len(run.rounds)} rounds"
        sentences.append(f"{label}: no update counted in {which}. Most often: {found[0].text}.")
    return sentences


def _pace(first: Named, other: Named) -> list[str]:
    mine, theirs = first[1].mean_latency(), other[1].mean_latency()
    if not mine or not theirs:
        return []
    return [
        f"A round of {first[0]} takes {_short(mine, first[1])}. A round of {other[0]} takes "
        f"{_short(theirs, other[1])}, {theirs / mine:.2f} times as long."
    ]


def _time_to_target(first: Named, other: Named) -> list[str]:
    mine, theirs = first[1].curve(), other[1].curve()
    highest = curves.highest_held(mine), curves.highest_held(theirs)
    if highest[0] is None or highest[1] is None:
        return []
    target = min(highest[0], highest[1])
    seconds = curves.seconds_to(mine, target), curves.seconds_to(theirs, target)
    if not seconds[0] or not seconds[1]:
        return []
    return [
        f"Both get to {percent(target)} and hold it for {curves.HOLD} tests: "
        f"{first[0]} after {_short(seconds[0], first[1])}, {other[0]} after {_short(seconds[1], other[1])}, "
        f"a speed-up of {seconds[1] / seconds[0]:.2f}."
    ]


def _tested(accuracy: float | None) -> str:
    return "not tested" if accuracy is None else percent(accuracy)


def _time(seconds: float, run: StoredRun) -> str:
    """Seconds with their clock: ``6.5 s virtual, backward passes only``."""
    return f"{duration(seconds)} {clock(run)}".strip()


def _short(seconds: float, run: StoredRun) -> str:
    return duration(seconds) + (" virtual" if run.is_virtual else "")
