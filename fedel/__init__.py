"""FedEL: federated learning for fleets of unequal devices, with one time budget for all.

    import fedel

    job = {"rounds": {"num_rounds": 10}, "partition": {"num_clients": 20}}
    result = fedel.simulate(job, model=make_net, data=(x_train, y_train, x_test, y_test))
    result.accuracy                  # of the last test, as a share
    result.rounds[0].clients         # what each client did in the first round
    result.frame()                   # one row per round, as a pandas DataFrame
    net = result.model()             # the trained network, a torch.nn.Module
    result.report()                  # a page with pictures

    fedel.compare(job, ["fedel", "fedavg"], seeds=3, model=make_net, data=arrays)   # means and intervals
    fedel.run("job.toml")                              # real servers and agents, as processes on this machine
    fedel.load("runs/job-fedel-0")                     # a run that lies on disk

A job is the path of a TOML file, a dict with the same keys, or a SimulationConfig or RunConfig. docs/python.md
has the rest; the command ``fedel`` calls the same functions.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["Comparison", "Result", "Stopped", "compare", "load", "run", "simulate"]

_PLACES = {
    "Comparison": "comparison",
    "Result": "results",
    "Stopped": "progress",
    "compare": "comparison",
    "load": "results",
    "run": "federation",
    "simulate": "simulation",
}
"""The module of ``fedel.api`` that has each name; ``__init__.pyi`` tells type checkers the same."""
_PACKAGES = ("data", "models", "strategies")
"""With what a notebook needs: ``fedel.strategies.FedEL(beta=0.4)``."""


def __getattr__(name: str) -> Any:
    # Only now: torch and gRPC take seconds to import, and servers and devices do not have all of it.
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f"fedel.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'fedel' has no attribute '{name}'")
    return getattr(import_module(f"fedel.api.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
