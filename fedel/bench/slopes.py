"""How a cost grows: its slope where both axes are logarithmic, and the picture of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from fedel.report.plots import draw, figure_with

Points = Sequence[tuple[float, float]]


def slope(points: Points) -> float | None:
    """Of the line that fits best: 1 is linear, 2 is square. ``None`` for less than two different places.

    >>> slope([(10, 3), (100, 30), (1000, 300)])
    1.0
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in logs)
    return round(float(above / sum((x - mean_x) ** 2 for x, _ in logs)), 3)


def told(points: Points) -> str:
    found = slope(points)
    return "-" if found is None else f"{found:.2f}"


def log_log(lines: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """The lines as SVG, each with its slope in the legend."""

    def picture(_: Sequence[object]) -> Figure:
        figure, axes = figure_with()
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{name}: slope {told(points)}")
        axes.set(xlabel=x_label, ylabel=y_label, xscale="log", yscale="log")
        axes.legend()
        return figure

    return draw(picture, ())
