"""Flower's simulation on Ray of the same clients and steps; run by the Python of an environment of its own.

python flower_simulation.py CLIENTS CLIENTS_OF_ROUND ROUNDS
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def samples() -> tuple[Any, Any]:
    """Made once in each of Ray's processes."""
    import numpy as np
    import torch
    from plain_training import data  # type: ignore[import-not-found]  # beside this file

    torch.set_num_threads(1)
    x, y, _, _ = data()
    return torch.from_numpy(x), torch.from_numpy(np.asarray(y, np.int64))


def main(num_clients: int, in_round: int, num_rounds: int) -> None:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
    from plain_training import model, train

    client, server = ClientApp(), ServerApp()

    @client.train()  # type: ignore[untyped-decorator]
    def fit(message: Any, context: Any) -> Any:
        from flower_simulation import samples  # type: ignore[import-not-found]  # in Ray's processes not ``__main__``

        x, y = samples()
        part = int(context.node_config["partition-id"])
        rows = slice(part * len(x) // num_clients, (part + 1) * len(x) // num_clients)
        network = model()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loss = train(network, x[rows], y[rows], part)
        numbers = MetricRecord({"loss": loss, "num-examples": len(x[rows])})
        content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": numbers})
        return Message(content=content, reply_to=message)

    @server.main()  # type: ignore[untyped-decorator]
    def serve(grid: Any, context: Any) -> None:  # noqa: ARG001
        share = in_round / num_clients
        method = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=num_clients)
        done = method.start(grid=grid, initial_arrays=ArrayRecord(model().state_dict()), num_rounds=num_rounds)
        if len(done.train_metrics_clientapp) < num_rounds:
            raise RuntimeError(f"clients trained in {len(done.train_metrics_clientapp)} of {num_rounds} rounds")

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
    run_simulation(server, client, num_supernodes=num_clients, backend_config=resources)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
