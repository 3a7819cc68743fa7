"""Is every tensor trained, by how many, and how unequal does that make the model?"""

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
                "They kept their values. Normal now and then; the panel below says for how long.",
                'run:fedel_tensors_untrained:count{run="$run"}',
                (("green", None), ("yellow", 1)),
                decimals=0,
                width=6,
            ),
            stat(
                "Longest untrained",
                "suffix: rounds",
                "Rounds since a client last trained the tensor that waits longest.",
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
                "Bias from training unequal parts, in the last round; 0 if every client trains every tensor.",
                'fedel_round_bias_o1{run="$run"}',
                decimals=3,
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
                "Untrained for longest",
                "suffix: rounds",
                "Rounds since a client last trained the tensor; the 20 that wait longest.",
                query('topk(20, fedel_tensor_untrained_rounds{run="$run"})', "{{tensor}}"),
                steps=(("green", None), ("yellow", 5), ("red", 20)),
                low=0,
            ),
            lines(
                "Selected tensors by client",
                "suffix: tensors",
                "How many tensors each client trained in its last round.",
                query('fedel_client_selected_tensors{run="$run", client=~"$client"}', "{{client}}"),
                low=0,
                size=(12, 10),
            ),
            lines(
                "O1 over time",
                "none",
                "Bias from training unequal parts, round by round.",
                query('fedel_round_bias_o1{run="$run"}', "O1"),
                low=0,
                size=(24, 7),
            ),
        ],
        [RUN, CLIENT],
    )
