"""The kinds of panels that the dashboards use, and their layout.

Colours are names from Grafana's palette, which adapts to the dark and the light theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39
"""Schema of Grafana 11; a newer Grafana migrates a dashboard when it loads it."""
COLUMNS = 24

GOOD_IS_LOW = (("green", None), ("yellow", 0.1), ("red", 0.2))
"""Colours of a deviation from T_th: above 20 % is over budget."""
DEVIATION = (("blue", None), ("green", -0.5), ("yellow", 0.1), ("red", 0.2))
"""The same, with blue for clients that leave half of their budget unused."""
PLAIN = (("blue", None),)
COUNTS = (
    "prefix:",
    *(f"suffix: {what}" for what in ("rounds", "uploads", "agents", "tensors", "blocks", "series")),
)
"""Units of whole numbers: an axis has no half of them."""


def query(expr: str, legend: str = "", instant: bool = False, buckets: bool = False) -> Json:
    """One expression; with ``buckets`` a histogram keeps its bounds, for a heat map."""
    return {
        "datasource": SOURCE,
        "expr": expr,
        "legendFormat": "{{le}}" if buckets else legend or "__auto",
        "format": "heatmap" if buckets else "time_series",
        "instant": instant,
        "range": not instant,
    }


def _panel(
    kind: str, title: str, unit: str, about: str, queries: Sequence[Json], options: Json, size: tuple[int, int]
) -> Json:
    width, height = size
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": SOURCE,
        "gridPos": {"x": 0, "y": 0, "w": width, "h": height},
        "targets": [{"refId": chr(ord("A") + i), **q} for i, q in enumerate(queries)],
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": options,
    }


def _with(panel: Json, **defaults: Any) -> Json:
    panel["fieldConfig"]["defaults"] |= {k: v for k, v in defaults.items() if v is not None}
    return panel


def _thresholds(steps: Sequence[tuple[str, float | None]]) -> Json:
    return {"mode": "absolute", "steps": [{"color": colour, "value": value} for colour, value in steps]}


def stat(
    title: str,
    unit: str,
    about: str,
    expr: str,
    steps: Sequence[tuple[str, float | None]] = PLAIN,
    legend: str = "",
    decimals: int | None = None,
    width: int = 3,
) -> Json:
    """One large number, with its recent values in the background."""
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "auto",
        "textMode": "value_and_name" if legend else "auto",
        "wideLayout": True,
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    }
    panel = _panel("stat", title, unit, about, [query(expr, legend)], options, (width, 4))
    return _with(panel, thresholds=_thresholds(steps), color={"mode": "thresholds"}, decimals=decimals)


def lines(
    title: str,
    unit: str,
    about: str,
    *queries: Json,
    stacked: bool = False,
    steps: Sequence[tuple[str, float | None]] | None = None,
    low: float | None = None,
    high: float | None = None,
    soft_high: float | None = None,
    size: tuple[int, int] = (12, 8),
) -> Json:
    """Values over time, drawn as steps, because they stay the same from one round to the next. ``steps`` are
    lines to compare with."""
    # The largest first: a table shows three or four rows before it has to be scrolled.
    table = {"displayMode": "table", "calcs": ["lastNotNull"], "sortBy": "Last *", "sortDesc": True}
    options = {
        "legend": {"showLegend": True, "placement": "bottom", **table},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    custom: Json = {
        "drawStyle": "line",
        "lineInterpolation": "stepAfter",
        "lineWidth": 1,
        "fillOpacity": 40 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    if soft_high is not None:
        custom |= {"axisSoftMin": 0, "axisSoftMax": soft_high}
    if steps is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
    panel = _panel("timeseries", title, unit, about, queries, options, size)
    thresholds = None if steps is None else _thresholds(steps)
    colour = {"mode": "palette-classic"}
    decimals = 0 if unit.startswith(COUNTS) else None
    return _with(
        panel, custom=custom, color=colour, min=low, max=high, thresholds=thresholds, decimals=decimals
    )


def band(title: str, unit: str, about: str, lower: Json, upper: Json, repeat: str, low: float) -> Json:
    """The area between two lines, filled; one panel for each value of a variable."""
    panel = lines(title, unit, about, lower, upper, low=low, size=(8, 6))
    panel["fieldConfig"]["defaults"]["custom"]["fillOpacity"] = 0
    panel["options"]["legend"] = {
        "showLegend": True,
        "displayMode": "list",
        "placement": "bottom",
        "calcs": [],
    }
    panel["fieldConfig"]["overrides"] = [
        {
            "matcher": {"id": "byFrameRefID", "options": "B"},
            "properties": [
                {"id": "custom.fillBelowTo", "value": lower["legendFormat"]},
                {"id": "custom.fillOpacity", "value": 35},
            ],
        }
    ]
    return panel | {"repeat": repeat, "repeatDirection": "h", "maxPerRow": 3}


def folded(title: str, panel: Json) -> Json:
    """A row that is closed at first: its panels cost nothing until it is opened."""
    place = {"x": 0, "y": 0, "w": COLUMNS, "h": 1}
    return {"type": "row", "title": title, "collapsed": True, "gridPos": place, "panels": [panel]}


def grid(
    title: str,
    unit: str,
    about: str,
    one: Json,
    steps: Sequence[tuple[str, float | None]] | None = None,
    low: float | None = None,
    high: float | None = None,
    size: tuple[int, int] = (COLUMNS, 12),
) -> Json:
    """A heat map with one row per series, such as a client, coloured by thresholds or by a scale."""
    options = {
        "showValue": "auto",
        "rowHeight": 0.9,
        "colWidth": 1,
        "perPage": 50,
        "legend": {"showLegend": steps is not None, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    panel = _panel("status-history", title, unit, about, [one], options, size)
    custom = {"fillOpacity": 85, "lineWidth": 0}
    if steps is not None:
        return _with(panel, custom=custom, thresholds=_thresholds(steps), color={"mode": "thresholds"})
    return _with(panel, custom=custom, color={"mode": "continuous-viridis"}, min=low, max=high)


def histogram(title: str, unit: str, about: str, expr: str, size: tuple[int, int] = (12, 9)) -> Json:
    """A heat map of the buckets of a histogram; the unit is that of the bucket bounds."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "Viridis",
            "fill": "dark-orange",
            "scale": "exponential",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
        },
        "exemplars": {"color": "orange"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
        "yAxis": {"axisPlacement": "left", "unit": unit, "reverse": False},
    }
    return _panel("heatmap", title, unit, about, [query(expr, buckets=True)], options, size)


def bars(
    title: str,
    unit: str,
    about: str,
    *queries: Json,
    steps: Sequence[tuple[str, float | None]] = PLAIN,
    low: float | None = None,
    high: float | None = None,
    decimals: int | None = None,
    size: tuple[int, int] = (12, 10),
) -> Json:
    """The newest value of each series, as a list of bars."""
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "horizontal",
        "displayMode": "basic",
        "valueMode": "color",
        "namePlacement": "auto",
        "showUnfilled": True,
        "sizing": "auto",
        "minVizWidth": 8,
        "minVizHeight": 16,
        "maxVizHeight": 300,
        "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
    }
    instant = [q | {"instant": True, "range": False} for q in queries]
    panel = _panel("bargauge", title, unit, about, instant, options, size)
    colour = {"mode": "thresholds"}
    return _with(panel, thresholds=_thresholds(steps), color=colour, min=low, max=high, decimals=decimals)


def variable(name: str, label: str, values: str, several: bool = False) -> Json:
    """A selection list at the top, filled by Prometheus; if several can be selected, all are at first."""
    made: Json = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": values, "refId": name},
        "refresh": 2,
        "sort": 7,
        "multi": several,
        "includeAll": several,
    }
    if several:
        made |= {"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
    return made


RUN = variable("run", "Run", "label_values(fedel_run_active, run)")
CLIENT = variable(
    "client", "Client", 'label_values(fedel_client_budget_deviation_ratio{run="$run"}, client)', several=True
)


def dashboard(
    uid: str, title: str, about: str, panels: Sequence[Json], variables: Sequence[Json] = (RUN,)
) -> Json:
    """Places panels in reading order: fills a row before it starts the next."""
    x = y = row_height = 0
    for number, panel in enumerate(panels, start=1):
        place = panel["gridPos"]
        if x + place["w"] > COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        place |= {"x": x, "y": y}
        x, row_height = x + place["w"], max(row_height, place["h"])
        panel["id"] = number
        for inner in panel.get("panels", []):
            inner["id"] = number + len(panels)
            inner["gridPos"]["y"] = y + 1
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["fedel"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_links()],
        "annotations": {"list": []},
        "templating": {"list": [source, *variables]},
        "panels": list(panels),
    }


def _links() -> Json:
    """Links to the other dashboards that keep the selected run and time."""
    return {
        "type": "dashboards",
        "title": "FedEL",
        "tags": ["fedel"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
    }
