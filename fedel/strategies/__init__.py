"""One method a file, all three parts in it: plan, fit, fold.

A strategy travels as a table, in a configuration file and on the wire alike::

    [strategy]
    name = "fedprox"
    mu = 0.01

    [strategy.base]
    name = "fedel"
    beta = 0.6
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedel.config import nearest, parse
from fedel.errors import ConfigError
from fedel.strategies.depthfl import DepthFL
from fedel.strategies.elastictrainer import ElasticTrainer
from fedel.strategies.fedavg import FedAvg
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
    )
}

__all__ = ["METHODS", "build", "describe", *(method.__name__ for method in METHODS.values())]


def build(table: Mapping[str, Any], where: str = "[strategy]") -> Strategy:
    """The strategy that a table describes.

    >>> build({"name": "fedprox", "mu": 0.1, "base": {"name": "fedel", "beta": 0.4}}).base.beta
    0.4
    >>> build({"name": "fedel", "betta": 0.4})
    Traceback (most recent call last):
    ...
    fedel.errors.ConfigError: [strategy]: unknown key 'betta'; did you mean 'beta'?
    """
    options = dict(table)
    name = str(options.pop("name", ""))
    if name not in METHODS:
        raise ConfigError(f"{where}: unknown strategy '{name}'; {nearest(name, METHODS)}")
    wraps = {f.name for f in dataclasses.fields(METHODS[name])} >= {"base"}
    base = build(options.pop("base"), f"{where}.base") if wraps and "base" in options else None
    strategy: Strategy = parse(METHODS[name], options, where)
    return dataclasses.replace(strategy, base=base) if base is not None else strategy  # type: ignore[type-var]


def describe(strategy: Strategy) -> dict[str, Any]:
    """The table from which ``build`` makes the same strategy again.

    >>> describe(FedProx(FedEL(beta=0.4)))["base"]["beta"]
    0.4
    """
    table: dict[str, Any] = {"name": strategy.name}
    for field in dataclasses.fields(strategy):  # type: ignore[arg-type]
        value = getattr(strategy, field.name)
        table[field.name] = describe(value) if field.name == "base" else value
    return table
