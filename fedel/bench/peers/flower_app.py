"""A Flower app without training, for SuperLink and SuperNodes; it is copied into an app as ``bench_app``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "bench"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedel"

[tool.flwr.app.components]
serverapp = "bench_app:server"
clientapp = "bench_app:client"

[tool.flwr.app.config]
config-file = "{config}"
"""


def server_app() -> Any:
    import numpy as np
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        config = json.loads(Path(context.run_config["config-file"]).read_text(encoding="utf-8"))
        num_clients = config["clients"]

        class Marked(FedAvg):  # type: ignore[misc]
            def aggregate_train(self, server_round: int, replies: Any) -> Any:
                replies = list(replies)
                good = sum(not reply.has_error() for reply in replies)
                if good != num_clients:
                    raise RuntimeError(f"round {server_round}: {good} of {num_clients} replies")
                made = super().aggregate_train(server_round, replies)
                with Path(config["rounds_file"]).open("a", encoding="utf-8") as file:
                    file.write(f"{server_round}\n")
                return made

        # Random, as weights are: Flower stores parts with the same bits once.
        rng = np.random.default_rng(0)
        first = [rng.standard_normal(shape, np.float32) for shape in config["shapes"]]
        Marked(
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=num_clients,
            min_available_nodes=num_clients,
        ).start(
            grid=grid,
            initial_arrays=ArrayRecord(first),
            num_rounds=config["rounds"],
        )

    return app


def client_app() -> Any:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        # Flower does not send again what has the same bits: every client changes every value.
        step = 1e-3 * (1 + context.node_id % 1000)
        arrays = message.content["arrays"].to_numpy_ndarrays()
        content = {
            "arrays": ArrayRecord([values + values.dtype.type(step) for values in arrays]),
            "metrics": MetricRecord({"num-examples": 100}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


if __name__ == "bench_app":
    server = server_app()
    client = client_app()
