"""Is every tensor trained, by how many clients, and how large is the bias from that?"""

from __future__ import annotations

from grafana.panels import CLIENT, RUN, Json, bars, dashboard, grid, lines, query, stat


def board() -> Json:
    return dashboard(
        "fedel-tensors",
        "FedEL: tensor coverage",
        "Which tensors clients select. A tensor that no client selects keeps its value.",
        [
            stat(
                "Tensors not trained last round",
                "suffix: tensors",
                "They kept their values. Normal from time to time; the panel below shows for how long.",
                'run:fedel_tensors_untrained:count{run="$run"}',
                (("green", None), ("yellow", 1)),
                decimals=0,
                width=6,
            ),
            stat(
                "Longest untrained",
                "suffix: rounds",
                "The largest number of rounds since a tensor was last trained.",
                'max(fedel_tensor_untrained_rounds{run="$run"})',
                (("green", None), ("yellow", 5), ("red", 20)),
                decimals=0,
                width=6,
            ),
            stat(
                "Tensors per client",
                "suffix: tensors",
                "Mean number of tensors that a client trained in its last round.",
                'avg(fedel_client_selected_tensors{run="$run"})',
                decimals=1,
                width=6,
            ),
            stat(
                "O1",
                "none",
                "Bias because clients train different parts; last round; 0 if all clients train all tensors.",
                'fedel_round_bias_o1{run="$run"}',
                width=6,
            ),
            grid(
                "Clients that trained each tensor",
                "suffix: clients",
                "One row per tensor; the darkest were trained by no client.",
                query('fedel_tensor_clients{run="$run"}', "{{tensor}}"),
                low=0,
                size=(24, 16),
            ),
            bars(
                "Longest untrained",
                "suffix: rounds",
                "Rounds since any client trained the tensor; the 12 largest.",
                query('topk(12, fedel_tensor_untrained_rounds{run="$run"})', "{{tensor}}"),
                steps=(("green", None), ("yellow", 5), ("red", 20)),
                low=0,
            ),
            lines(
                "Selected tensors by client",
                "suffix: tensors",
                "Number of tensors that each client trained in its last round.",
                query('fedel_client_selected_tensors{run="$run", client=~"$client"}', "{{client}}"),
                low=0,
                size=(12, 10),
            ),
            lines(
                "O1 over time",
                "none",
                "Bias because clients train different parts, per round.",
                query('fedel_round_bias_o1{run="$run"}', "O1"),
                low=0,
                size=(24, 7),
            ),
        ],
        [RUN, CLIENT],
    )
