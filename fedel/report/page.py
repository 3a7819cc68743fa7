"""Writes the report: ``report.html``, and ``report.md`` with the same numbers."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from fedel.report import plots
from fedel.report.runs import StoredRun

PICTURES = (
    ("Accuracy against time", plots.accuracy_against_time, "How quickly each method reaches a given accuracy."),
    (
        "Time of each client",
        plots.round_time_by_client,
        "Seconds per round that count against the time budget; the dashed line is that budget, T_th.",
    ),
    (
        "Where the seconds of a round go",
        plots.seconds_by_phase,
        "Each client in the mean of the last rounds; the dashed line is T_th. A client is idle while it waits"
        " for the others; wait is for a permit to send; commit is from the last update to the new model.",
    ),
    (
        "Deviation from T_th",
        plots.deviation,
        "At 0 % a client uses exactly its budget. A round takes as long as its slowest client.",
    ),
    (
        "Tensors trained",
        plots.selection_map,
        "Each square is a tensor that was trained in that round. Windows slide from the input to the output.",
    ),
    ("Bytes", plots.bytes_by_round, "Sent and received per round, all clients together."),
)

_CSS = Path(__file__).with_name("report.css")

COLUMNS = (
    "method",
    "rounds",
    "accuracy",
    "best",
    "s/round",
    "time",
    "vs. T_th",
    "MB up",
    "MB down",
    "epsilon",
)


def rows(runs: Sequence[StoredRun]) -> list[list[str]]:
    """The numbers of the comparison table: one row per run, columns as in ``COLUMNS``."""
    table = []
    for run in runs:
        accuracies = [accuracy for _, _, accuracy in run.accuracies()]
        deviations = run.deviations()
        mean_deviation = sum(deviations) / len(deviations) if deviations else None
        table.append(
            [
                run.strategy,
                str(len(run.rounds)),
                _percent(accuracies[-1] if accuracies else None),
                _percent(max(accuracies, default=None)),
                _number(run.mean_latency(), 2),
                _number(sum(r.latency_seconds for r in run.rounds), 1) + " s",
                _percent(mean_deviation, signed=True),
                _number(sum(r.bytes_up for r in run.rounds) / 1e6, 1),
                _number(sum(r.bytes_down for r in run.rounds) / 1e6, 1),
                _number(run.rounds[-1].epsilon if run.rounds else None, 2),
            ]
        )
    return table


def verdicts(runs: Sequence[StoredRun]) -> list[str]:
    """Sentences that compare the first run with each of the others."""
    sentences = []
    first, *others = runs
    for other in others:
        mine, theirs = first.mean_latency(), other.mean_latency()
        if mine and theirs:
            sentences.append(
                f"A round of {first.strategy} takes {mine:.2f} s. A round of {other.strategy} takes "
                f"{theirs:.2f} s, {theirs / mine:.2f} times as long."
            )
        if first.accuracies() and other.accuracies():
            target = min(max(a for _, _, a in run.accuracies()) for run in (first, other))
            mine, theirs = first.seconds_to(target), other.seconds_to(target)
            assert mine is not None
            assert theirs is not None
            sentences.append(
                f"Both reach {100 * target:.1f} % accuracy: {first.strategy} after {mine:.1f} s, "
                f"{other.strategy} after {theirs:.1f} s, a speed-up of {theirs / mine:.2f}."
            )
    return sentences


def averaged(runs: Sequence[StoredRun]) -> list[str]:
    """Sentences about runs whose accuracies are not those of single versions."""
    shares = [(run.strategy, run.settings.get("server", {}).get("average", 0.0)) for run in runs]
    return [
        f"The tested model of {strategy} is an average over versions, of which {100 * share:g} % stays in each"
        f" round ([server] average = {share:g})."
        for strategy, share in shares
        if share
    ]


def write(runs: Sequence[StoredRun], directory: Path, title: str = "") -> Path:
    """Write ``report.html`` and ``report.md``; returns the page's path."""
    title = title or " and ".join(dict.fromkeys(run.strategy for run in runs))
    table, sentences = rows(runs), verdicts(runs) + averaged(runs)
    pictures = [(name, plots.draw(picture, runs), note) for name, picture, note in PICTURES]
    page = directory / "report.html"
    page.write_text(_html(title, table, sentences, pictures, runs), encoding="utf-8")
    (directory / "report.md").write_text(_markdown(title, table, sentences, runs), encoding="utf-8")
    return page


def _html(
    title: str,
    table: list[list[str]],
    sentences: list[str],
    pictures: list[tuple[str, str, str]],
    runs: Sequence[StoredRun],
) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table)
    legend = (
        "accuracy: after the last round; best: best round; s/round: mean seconds per round; vs. T_th: mean "
        "training time of a client compared with its budget; MB: all clients and rounds together; epsilon: "
        "privacy that a client in every round has spent. "
        "In a simulation all seconds are virtual."
    )
    drawn = "".join(
        f"<h2>{html.escape(name)}</h2><p class=note>{html.escape(note)}</p><figure>{svg}</figure>"
        for name, svg, note in pictures
    )
    settings = "".join(
        f"<details><summary>Configuration of {html.escape(run.name)}</summary><pre>"
        f"{html.escape(json.dumps(run.settings, indent=2))}</pre></details>"
        for run in runs
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_CSS.read_text(encoding='utf-8')}</style><h1>{html.escape(title)}</h1>"
        + "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)
        + f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        + f"<p class=note>{legend}</p>"
        + drawn
        + settings
        + "</html>"
    )


def _markdown(title: str, table: list[list[str]], sentences: list[str], runs: Sequence[StoredRun]) -> str:
    lines = [f"# {title}", "", *(f"{sentence}\n" for sentence in sentences)]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in table]
    lines += ["", *(f"- {run.strategy}: `{run.path}`, seed {run.settings.get('seed', '?')}" for run in runs)]
    return "\n".join(lines) + "\n"


def _percent(value: float | None, signed: bool = False) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
