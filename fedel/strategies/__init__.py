"""One file per method, with all three parts in it: plan, fit, fold.

A strategy is sent and stored as a table, the same in a configuration file and on the wire::

    [strategy]
    name = "fedprox"
    mu = 0.01

    [strategy.base]
    name = "fedel"
    beta = 0.6

``name = "package.module:Class"`` is a method of the user's own (see ``docs/own-method.md``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedel import plugins
from fedel.config import parse
from fedel.errors import ConfigError
from fedel.strategies.depthfl import DepthFL
from fedel.strategies.elastictrainer import ElasticTrainer
from fedel.strategies.fedavg import FedAvg
from fedel.strategies.fedavg_cut import FedAvgCut
from fedel.strategies.fedavg_fast import FedAvgFast
from fedel.strategies.fedel import FedEL
from fedel.strategies.fednova import FedNova
from fedel.strategies.fedprox import FedProx
from fedel.strategies.fiarse import FIARSE
from fedel.strategies.heterofl import HeteroFL
from fedel.strategies.pyramidfl import PyramidFL
from fedel.strategies.timelyfl import TimelyFL
from fedel.types import Strategy

METHODS: Mapping[str, type[Any]] = {
    method.name: method
    for method in (
        FedAvg,
        FedProx,
        FedNova,
        ElasticTrainer,
        FedEL,
        HeteroFL,
        DepthFL,
        PyramidFL,
        TimelyFL,
        FIARSE,
        FedAvgCut,
        FedAvgFast,
    )
}
"""The last two are controls, not methods of the paper."""

GROUP = "fedel.strategies"
"""Entry points of installed packages that bring methods."""
PARTS = (
    *("plan", "fit", "fold", "name", "weighting", "budget_scope", "fits_steps", "sends_parts", "fits_memory"),
    *("widths", "exits_to_average"),
)
"""What makes a class a strategy, as in ``fedel.types.Strategy``."""

__all__ = [
    "METHODS",
    "build",
    "complete",
    "defaults",
    "describe",
    "find",
    *(method.__name__ for method in METHODS.values()),
]


def build(table: Mapping[str, Any], where: str = "[strategy]") -> Strategy:
    """The strategy that a table describes.

    >>> build({"name": "fedprox", "mu": 0.1, "base": {"name": "fedel", "beta": 0.4}}).base.beta
    0.4
    >>> build({"name": "fedel", "betta": 0.4})
    Traceback (most recent call last):
    ...
    fedel.errors.ConfigError: [strategy]: unknown key 'betta'; did you mean 'beta'?
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} = {table!r}: expected a table, such as {{ name = 'fedel' }}")
    options = dict(table)
    method = find(str(options.pop("name", "")), where)
    wraps = "base" in {f.name for f in dataclasses.fields(method)}
    base = build(options.pop("base"), f"{where}.base") if wraps and "base" in options else None
    strategy: Strategy = parse(method, options, where)
    return dataclasses.replace(strategy, base=base) if base is not None else strategy  # type: ignore[type-var]


def find(name: str, where: str = "[strategy]") -> type[Any]:
    """The class of a method: one of FedEL's, or the user's own by its path or entry point."""
    if name in METHODS:
        return METHODS[name]
    method = plugins.find(name, GROUP, f"{where}: strategy", ConfigError, METHODS)
    if not isinstance(method, type) or not dataclasses.is_dataclass(method):
        raise ConfigError(
            f"{where}: '{name}' is not a dataclass; write it as a class under @dataclass(frozen=True), whose "
            "fields are its options"
        )
    has = {*dir(method), *(f.name for f in dataclasses.fields(method))}
    if missing := [part for part in PARTS if part not in has]:
        raise ConfigError(
            f"{where}: '{name}' is not a strategy: {', '.join(missing)} missing; see fedel.types.Strategy, and "
            "fedel.strategies.base.Method for what most methods have in common"
        )
    return method


def describe(strategy: Strategy) -> dict[str, Any]:
    """The table from which ``build`` makes the same strategy again.

    >>> describe(FedProx(FedEL(beta=0.4)))["base"]["beta"]
    0.4
    """
    kind = type(strategy)
    own = METHODS.get(strategy.name) is not kind
    table: dict[str, Any] = {"name": f"{kind.__module__}:{kind.__qualname__}" if own else strategy.name}
    for field in dataclasses.fields(strategy):  # type: ignore[arg-type]
        value = getattr(strategy, field.name)
        table[field.name] = describe(value) if field.name == "base" else value
    return table


def complete(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the method's defaults written out, under the name that it has there.

    >>> complete({"name": "fedprox", "base": {"name": "fedel", "beta": 0.4}})["base"]["beta"]
    0.4
    """
    whole = {**describe(build(table)), "name": table["name"]}
    return {**whole, "base": complete(table["base"])} if "base" in table else whole


def defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table of the same method with every option at its default; of a method of the user's own only its
    name, because its code may not be here.

    >>> defaults({"name": "fedprox", "base": {"name": "fedel", "beta": 0.4}})["base"]["beta"]
    0.6
    """
    bare = _without_options(table)
    return complete(bare) if _is_ours(bare) else bare


def _is_ours(table: Mapping[str, Any]) -> bool:
    return table["name"] in METHODS and ("base" not in table or _is_ours(table["base"]))


def _without_options(table: Mapping[str, Any]) -> dict[str, Any]:
    bare = {"name": table["name"]}
    return {**bare, "base": _without_options(table["base"])} if "base" in table else bare
