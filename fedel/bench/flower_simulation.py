"""Flower's simulation on Ray of the same clients and steps; a script for an environment of its own.

python flower_simulation.py CLIENTS CLIENTS_OF_ROUND ROUNDS
"""

# Nothing of FedEL is imported, and this folder is on the path, because the script is started by its file.

import sys

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from plain_training import data, model, train

NUM_CLIENTS, IN_ROUND, NUM_ROUNDS = map(int, sys.argv[1:4])
client_app, server_app = ClientApp(), ServerApp()
_kept: dict[str, object] = {}


def samples():  # type: ignore[no-untyped-def]
    """Made once in each of Ray's processes."""
    if not _kept:
        torch.set_num_threads(1)
        x, y, _, _ = data()
        _kept.update(x=torch.from_numpy(x), y=torch.from_numpy(np.asarray(y, np.int64)))
    return _kept["x"], _kept["y"]


@client_app.train()
def fit(message: Message, context: Context) -> Message:
    x, y = samples()
    part = int(context.node_config["partition-id"])
    rows = slice(part * len(x) // NUM_CLIENTS, (part + 1) * len(x) // NUM_CLIENTS)
    network = model()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train(network, x[rows], y[rows], part)
    numbers = MetricRecord({"loss": loss, "num-examples": len(x[rows])})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": numbers})
    return Message(content=content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
    strategy = FedAvg(
        fraction_train=IN_ROUND / NUM_CLIENTS, fraction_evaluate=0.0, min_available_nodes=NUM_CLIENTS
    )
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model().state_dict()), num_rounds=NUM_ROUNDS)


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=NUM_CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}},
    )
