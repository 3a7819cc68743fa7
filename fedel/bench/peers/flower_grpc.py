"""Flower's gRPC server and its clients, without training; run by the Python of Flower's own environment.

python flower_grpc.py server CONFIG.json
python flower_grpc.py clients CONFIG.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MESSAGE_BYTES = 2**31 - 1
"""Flower's default of 512 MiB is less than the largest model."""


def serve(config: dict[str, Any]) -> None:
    import flwr
    import numpy as np

    class Marked(flwr.server.strategy.FedAvg):  # type: ignore[misc]
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            if failures or len(results) != config["clients"]:
                sys.exit(f"round {server_round}: {len(results)} results; {failures[:1]}")
            made = super().aggregate_fit(server_round, results, failures)
            with Path(config["rounds_file"]).open("a", encoding="utf-8") as file:
                file.write(f"{server_round}\n")
            return made

    rng = np.random.default_rng(0)
    first = [rng.standard_normal(shape, np.float32) for shape in config["shapes"]]
    num_clients = config["clients"]
    flwr.server.start_server(
        server_address=config["address"],
        config=flwr.server.ServerConfig(num_rounds=config["rounds"]),
        strategy=Marked(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=num_clients,
            min_available_clients=num_clients,
            initial_parameters=flwr.common.ndarrays_to_parameters(first),
        ),
        grpc_max_message_length=MESSAGE_BYTES,
    )


def play(config: dict[str, Any]) -> None:
    """Each client is a process of its own; they share what was imported before."""
    import flwr

    class Client(flwr.client.NumPyClient):  # type: ignore[misc]
        def fit(self, parameters: list[Any], _settings: Any) -> tuple[list[Any], int, dict[str, Any]]:
            return [values + values.dtype.type(1e-3) for values in parameters], 100, {}

    children = []
    for _ in range(config["clients"]):
        child = os.fork()
        if child == 0:
            flwr.client.start_client(
                server_address=config["address"],
                client=Client().to_client(),
                grpc_max_message_length=MESSAGE_BYTES,
                insecure=True,
            )
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    (serve if sys.argv[1] == "server" else play)(given)
