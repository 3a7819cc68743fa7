"""Writes the report: ``report.html``, and ``report.md`` with the same numbers."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedel.report import client_plots, curves, exit_plots, plots
from fedel.report.about import about
from fedel.report.figures import TextTable, labels, table
from fedel.report.own_tests import HEADS as OWN_HEADS
from fedel.report.own_tests import NOTE as OWN_NOTE
from fedel.report.own_tests import rows as own_tests
from fedel.report.refusals import reasons
from fedel.report.runs import StoredRun
from fedel.report.verdicts import verdicts
from fedel.report.words import clocks_note, percent
from fedel.serialisation import to_json

PagePicture = tuple[str, str, plots.Picture, str]
"""File name, title, picture, and what to know about it."""
_TESTS = f"Dots are single tests, lines are means over the last {curves.SMOOTH:.0%} of the time so far."

PICTURES: Sequence[PagePicture] = (
    ("accuracy-by-time", "Accuracy by time", plots.accuracy_by_time, _TESTS),
    ("accuracy-by-round", "Accuracy by round", plots.accuracy_by_round, _TESTS),
    ("loss", "Loss", plots.loss_by_round, "Training: mean of the clients that count. Test: of the new model."),
    (
        "client-time",
        "Time of each client",
        client_plots.time_by_client,
        "The seconds per round that count against the time budget T_th (dashed). Dots are clients, lines are "
        "medians of a device type; where all devices are of one type, each of a few clients has its own.",
    ),
    (
        "phases",
        "Where the seconds of a round go",
        client_plots.seconds_by_phase,
        f"The mean of the last {client_plots.NUM_ROUNDS_SHOWN} rounds: of each client, or each device type "
        f"where more than {client_plots.NUM_BARS} clients took part; the dashed line is T_th. A client is idle "
        "while it waits for the others; wait is for a permit to send; commit is from the last update to the "
        "new model.",
    ),
    (
        "deviation",
        "Deviation from T_th",
        client_plots.deviation,
        "At 0 % a client uses exactly its budget. A round takes as long as its slowest client.",
    ),
    (
        "tensors",
        "Tensors trained",
        client_plots.selection_map,
        "Dark: trained in that round. Pale: the client took part without this tensor. White: it took no part. "
        f"Of more than {client_plots.FEW_CLIENTS} clients, one per device type.",
    ),
    ("bytes", "Bytes", plots.bytes_by_round, "Sent (up) and received (down) per round, all clients together."),
)

EXITS: PagePicture = (
    "exits",
    "Accuracy and time of the exits",
    exit_plots.accuracy_by_exit,
    "Each dot is the model up to one exit, with the number of its block. Measured by fedel exits.",
)
"""Only of runs whose exits were measured."""

_CSS = Path(__file__).with_name("report.css")
_NOTED_SHARE = 0.02
"""Of T_th; less is not worth a sentence."""
_LOST_HEADS = ["method", "updates", "rounds", "clients", "reason"]


@dataclass(frozen=True)
class PageTable:
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    kind: str = "numbers"
    """Its class in ``report.css``."""


@dataclass(frozen=True)
class Page:
    """What a report shows, in this order."""

    title: str
    about: Sequence[str]
    sentences: Sequence[str]
    tables: Sequence[PageTable]
    pictures: Sequence[PagePicture]
    """Each is drawn from ``drawn``."""
    drawn: Sequence[StoredRun]
    runs: Sequence[StoredRun]
    """Listed with their settings."""


def averaged(runs: Sequence[StoredRun]) -> list[str]:
    """Sentences about runs whose accuracies are not those of single versions."""
    shares = [(run.strategy, run.settings.get("server", {}).get("average", 0.0)) for run in runs]
    return [
        f"The tested model of {strategy} is an average over versions, of which {100 * share:g} % stays in each"
        f" round ([server] average = {share:g})."
        for strategy, share in shares
        if share
    ]


def probed(runs: Sequence[StoredRun]) -> list[str]:
    """Sentences about simulations whose clients take longer than T_th because they probe importance first."""
    simulated = [run for run in runs if run.is_virtual and run.has_probe_on_top and not run.drifts]
    shares = [(run.method, run.mean_beyond_plan()) for run in simulated]
    return [
        f"The importance probe of {method} comes on top of T_th, as in the paper; here it takes"
        f" {percent(share)} of T_th. With strategy.probe_in_budget = true it is a part of T_th."
        for method, share in shares
        if share is not None and share > _NOTED_SHARE
    ]


def pictures_of(runs: Sequence[StoredRun]) -> list[PagePicture]:
    """Those that runs have something for."""
    return [*PICTURES, *([EXITS] if any(run.exits for run in runs) else [])]


def write(runs: Sequence[StoredRun], directory: Path, title: str = "") -> Path:
    """Write ``report.html`` and ``report.md`` about runs; returns the page's path."""
    return write_page(page_of(runs, title), directory)


def write_page(page: Page, directory: Path) -> Path:
    file = directory / "report.html"
    file.write_text(_html(page), encoding="utf-8")
    (directory / "report.md").write_text(_markdown(page), encoding="utf-8")
    return file


def page_of(runs: Sequence[StoredRun], title: str = "") -> Page:
    """The report about runs, side by side."""
    return Page(
        title=title or " and ".join(labels(runs)),
        about=[*about(runs), *averaged(runs), *probed(runs)],
        sentences=verdicts(runs),
        tables=[*run_tables(runs), *_exits(runs)],
        pictures=pictures_of(runs),
        drawn=runs,
        runs=runs,
    )


def run_tables(runs: Sequence[StoredRun], title: str = "") -> list[PageTable]:
    """The numbers of each run, tests on clients' own data, and updates that did not count."""
    numbers, lost, own = table(runs), _lost(runs), own_tests(runs)
    found = [PageTable(numbers.heads, numbers.rows, title, _note(numbers, runs))]
    if own:
        found.append(PageTable(OWN_HEADS, own, "On each client's own data", OWN_NOTE))
    return [*found, PageTable(_LOST_HEADS, lost, "Updates that did not count", kind="words")] if lost else found


def save_pictures(
    runs: Sequence[StoredRun], directory: Path, kind: str, pictures: Sequence[PagePicture] = ()
) -> list[Path]:
    """Every picture as a file of its own, for a paper."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, _, picture, _ in pictures or pictures_of(runs):
        files.append(directory / f"{name}.{kind}")
        plots.save(picture, runs, files[-1])
    return files


def _html(page: Page) -> str:
    numbers = "".join(
        (f"<h2>{html.escape(each.title)}</h2>" if each.title else "")
        + _html_table(each.heads, each.rows, each.kind)
        + (f"<p class=note>{html.escape(each.note)}</p>" if each.note else "")
        for each in page.tables
    )
    drawn = "".join(
        f"<h2>{html.escape(name)}</h2><p class=note>{html.escape(note)}</p>"
        f"<figure>{plots.draw(picture, page.drawn)}</figure>"
        for _, name, picture, note in page.pictures
    )
    settings = "".join(
        f"<details><summary>Configuration of {html.escape(run.name)}</summary><pre>"
        f"{html.escape(to_json(run.settings, pretty=True))}</pre></details>"
        for run in page.runs
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(page.title)}</title><style>{_CSS.read_text(encoding='utf-8')}</style>"
        f"<h1>{html.escape(page.title)}</h1>"
        + "".join(f"<p class=about>{html.escape(line)}</p>" for line in page.about)
        + "".join(f"<p class=verdict>{html.escape(sentence)}</p>" for sentence in page.sentences)
        + numbers
        + drawn
        + settings
        + "</html>\n"
    )


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    made = f"<table class={kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=scroll>{made}</div>"


def _markdown(page: Page) -> str:
    lines = [f"# {page.title}", "", *(f"{line}\n" for line in (*page.about, *page.sentences))]
    for each in page.tables:
        lines += [f"## {each.title}", ""] if each.title else []
        lines += [*_markdown_table(each.heads, each.rows), ""]
        lines += [each.note, ""] if each.note else []
    lines += [f"- {label}: `{run.path}`" for label, run in zip(labels(page.runs), page.runs, strict=True)]
    return "\n".join(lines) + "\n"


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [heads, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(heads), *lines[1:]]


def _exits(runs: Sequence[StoredRun]) -> list[PageTable]:
    rows = exit_plots.rows(runs)
    return [PageTable(exit_plots.HEADS, rows, "Exits", exit_plots.note(runs))] if rows else []


def _note(numbers: TextTable, runs: Sequence[StoredRun]) -> str:
    return f"{numbers.note} {clocks_note(runs)} Rounds are counted from 1."


def _lost(runs: Sequence[StoredRun]) -> list[list[str]]:
    """One row per method and reason."""
    return [
        [label, str(len(reason.clients)), reason.when, reason.who, reason.text]
        for label, run in zip(labels(runs), runs, strict=True)
        for reason in reasons(run.rounds)
    ]
