"""Dashboards are what the code says, explain themselves, use metrics that exist, and fit Grafana's types."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grafana import build
from tests.monitoring.files import (
    DASHBOARDS,
    REPOSITORY,
    declared,
    load,
    metrics_in,
    panel_expressions,
    panels,
    recorded_in,
    rules,
)

BOARDS = {path.stem: load(path) for path in DASHBOARDS}
EXPECTED = {"overview", "latency", "deviation", "windows", "tensors", "bytes", "energy", "services"}
PANELS = [pytest.param(p, id=f"{name}-{p['title']}") for name, board in BOARDS.items() for p in panels(board)]

CONFIGURED = {
    "timeseries": "timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen",
    "stat": "stat/panelcfg/x/StatPanelCfg_types.gen",
    "status-history": "statushistory/panelcfg/x/StatusHistoryPanelCfg_types.gen",
    "heatmap": "heatmap/panelcfg/x/HeatmapPanelCfg_types.gen",
    "bargauge": "bargauge/panelcfg/x/BarGaugePanelCfg_types.gen",
}
"""Where Grafana describes the options of each kind of panel that is used here."""
PRELUDE = """\
import type { Dashboard } from '@grafana/schema';
// In JSON an enum is its value.
type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
"""


def test_committed_dashboards_are_what_the_code_makes() -> None:
    made = {name: build.text_of(board) for name, board in build.boards().items()}
    there = {path.name: path.read_text(encoding="utf-8") for path in DASHBOARDS}
    assert made == there, "run `python -m grafana.build`"


def test_there_is_a_dashboard_for_each_question() -> None:
    assert {f"fedel-{name}" for name in EXPECTED} == BOARDS.keys()


@pytest.mark.parametrize("board", BOARDS.values(), ids=list(BOARDS))
def test_a_dashboard_is_found_and_lets_one_choose(board: dict[str, Any]) -> None:
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert "datasource" == names[0]
    ids = [panel["id"] for panel in [*board["panels"], *panels(board)] if panel["type"] != "row"]
    assert len(set(ids)) == len({id(p) for p in panels(board)})
    used = json.dumps(board)
    for variable in ("run", "client"):
        assert (f"${variable}" in used) == (variable in names)
    assert board["description"]
    assert ["fedel"] == board["tags"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_and_in_which_unit(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"]) > 20
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert all(target["expr"] for target in panel["targets"])
    assert {"type": "prometheus", "uid": "${datasource}"} == panel["datasource"]


@pytest.mark.parametrize("board", BOARDS.values(), ids=list(BOARDS))
def test_panels_do_not_overlap_and_stay_on_the_page(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_every_metric_in_a_dashboard_exists() -> None:
    known, recorded = declared(), {rule["record"] for rule in rules("record")}
    for expr in panel_expressions():
        assert set() == metrics_in(expr) - known
        assert set() == recorded_in(expr) - recorded


def test_grafana_is_told_where_prometheus_and_the_dashboards_are() -> None:
    folder = REPOSITORY / "grafana" / "provisioning"
    (source,) = load(folder / "datasources" / "prometheus.yml")["datasources"]
    assert "prometheus" == source["type"]
    (provider,) = load(folder / "dashboards" / "fedel.yml")["providers"]
    assert provider["options"]["path"]


def typescript(board: dict[str, Any]) -> str:
    """The dashboard as a constant of Grafana's type, and so for the options of each panel."""
    lines = [PRELUDE]
    for kind, module in CONFIGURED.items():
        name = kind.replace("-", "")
        lines.append(f"import type * as {name} from '@grafana/schema/dist/esm/raw/composable/{module}';")
    lines.append(f"export const board: Json<Dashboard> = {json.dumps(board)};")
    for number, panel in enumerate(panels(board)):
        name = panel["type"].replace("-", "")
        lines.append(f"export const o{number}: Json<{name}.Options> = {json.dumps(panel['options'])};")
        custom = panel["fieldConfig"]["defaults"].get("custom")
        if custom is not None:
            lines.append(f"export const c{number}: Json<{name}.FieldConfig> = {json.dumps(custom)};")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def compile_boards(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], str]:
    """Names of dashboards to what the compiler says of them; nothing if all is well."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing, which brings Grafana's types")
    folder: Path = tmp_path_factory.mktemp("grafana")
    packages = ["typescript@5.9.3", "@grafana/schema@13.2.3"]
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install Grafana's types here: {done.stderr[-300:]}")

    def compiled(boards: dict[str, Any]) -> str:
        files = [folder / f"{name}.ts" for name in boards]
        for file, board in zip(files, boards.values(), strict=True):
            file.write_text(typescript(board), encoding="utf-8")
        options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022"]
        options += ["--module", "preserve", "--moduleResolution", "bundler"]
        tsc = folder / "node_modules" / ".bin" / "tsc"
        return subprocess.run(
            [tsc, *options, *files], cwd=folder, capture_output=True, text=True, check=False
        ).stdout

    return compiled


@pytest.mark.slow
def test_dashboards_fit_the_types_of_grafana(compile_boards: Callable[[dict[str, Any]], str]) -> None:
    assert "" == compile_boards(BOARDS)


@pytest.mark.slow
def test_those_types_catch_mistakes(compile_boards: Callable[[dict[str, Any]], str]) -> None:
    def broken(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        board = copy.deepcopy(BOARDS["fedel-overview"])
        change(board)
        return board

    graph = next(i for i, p in enumerate(BOARDS["fedel-overview"]["panels"]) if p["type"] == "timeseries")
    told = compile_boards(
        {
            "place": broken(lambda b: b["panels"][0]["gridPos"].update(w="3")),
            "colour": broken(
                lambda b: b["panels"][0]["fieldConfig"]["defaults"]["color"].update(mode="rainbow")
            ),
            "option": broken(lambda b: b["panels"][graph]["options"]["legend"].update(placement="nowhere")),
            "custom": broken(
                lambda b: b["panels"][graph]["fieldConfig"]["defaults"]["custom"].update(lineWidt=1)
            ),
            "variable": broken(lambda b: b["templating"]["list"][1].update(type="querry")),
            "unknown": broken(lambda b: b.update(pannels=[])),
        }
    )
    assert {"place", "colour", "option", "custom", "variable", "unknown"} == {
        line.split(".ts")[0] for line in told.splitlines() if ".ts(" in line
    }
