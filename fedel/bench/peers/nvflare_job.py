"""A job of NVIDIA FLARE without training, in its simulator; run by the Python of FLARE's own environment.

python nvflare_job.py job CONFIG.json
python nvflare_job.py client CONFIG.json      (FLARE calls this in every client)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def run_job(config: dict[str, Any], config_file: str) -> None:
    from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
    from nvflare.recipe import SimEnv

    recipe = NumpyFedAvgRecipe(
        name="bench",
        model=[0.0],
        min_clients=config["clients"],
        # A round is marked when a client has its model: the last one needs another round after it.
        num_rounds=config["rounds"] + 1,
        train_script=__file__,
        train_args=f"client {config_file}",
    )
    recipe.execute(SimEnv(num_clients=config["clients"], workspace_root=config["folder"]))


def play(config: dict[str, Any]) -> None:
    """FLARE's numpy jobs begin with one array. In the first round clients add the tensors of the model to it;
    from then on they are part of it. FLARE stores that one array only, which costs it less than a model would.
    """
    import numpy as np
    import nvflare.client as flare

    flare.init()
    marks = flare.get_site_name() == "site-1"
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        if marks and model.current_round:
            with Path(config["rounds_file"]).open("a", encoding="utf-8") as file:
                file.write(f"{model.current_round}\n")
        params = {name: values + values.dtype.type(1e-3) for name, values in model.params.items()}
        if len(params) == 1:
            rng, shapes = np.random.default_rng(0), enumerate(config["shapes"])
            params |= {f"{i:03d}": rng.standard_normal(shape, np.float32) for i, shape in shapes}
        flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": 1}))


if __name__ == "__main__":
    kind, file_name = sys.argv[1:3]
    given = json.loads(Path(file_name).read_text(encoding="utf-8"))
    run_job(given, file_name) if kind == "job" else play(given)
