"""Do the clients stay within T_th?"""

from __future__ import annotations

from grafana.panels import (
    CLIENT,
    DEVIATION,
    GOOD_IS_LOW,
    RUN,
    Json,
    bars,
    dashboard,
    grid,
    histogram,
    lines,
    query,
)


def board() -> Json:
    client = '{run="$run", client=~"$client"}'
    return dashboard(
        "fedel-deviation",
        "FedEL: deviation from T_th",
        "Time that counts divided by the time budget, minus one. At 0 % a client uses its budget exactly.",
        [
            grid(
                "Deviation by client",
                "percentunit",
                "One row per client. Blue: half of the budget is unused. Green: within the budget."
                " Yellow: over it. Red: over it by more than 20 %. The first 1,000 clients have a row.",
                query(f"fedel_client_budget_deviation_ratio{client}", "{{client}}"),
                steps=DEVIATION,
                size=(24, 14),
            ),
            histogram(
                "All clients and rounds",
                "percentunit",
                "Number of client rounds by deviation, for all clients, including those without a row above.",
                'sum by (le) (increase(fedel_budget_deviation_ratio_bucket{run="$run"}[$__rate_interval]))',
            ),
            lines(
                "By device type",
                "percentunit",
                "Median and 95th percentile of the last hour. Computed from buckets, so approximate.",
                query(
                    'run_device_type:fedel_budget_deviation_ratio:p50_1h{run="$run"}', "{{device_type}}, median"
                ),
                query(
                    'run_device_type:fedel_budget_deviation_ratio:p95_1h{run="$run"}', "{{device_type}}, 95th"
                ),
                steps=GOOD_IS_LOW,
                soft_high=0.25,
                size=(12, 9),
            ),
            bars(
                "Furthest over T_th",
                "percentunit",
                "The 12 clients with the largest deviation in their last round.",
                query(f"topk(12, fedel_client_budget_deviation_ratio{client})", "{{client}}"),
                steps=DEVIATION,
                low=-1,
                high=1,
                decimals=1,
            ),
            lines(
                "Slower than the profile",
                "suffix: times",
                "By measured rounds, for each client. Rises with heat, a lower power mode or a neighbour on the"
                " device; the client then trains less in the same time.",
                query(f"topk(12, fedel_client_slowness_ratio{client})", "{{client}}"),
                size=(12, 10),
            ),
            bars(
                "Rounds in a row over 1.2 T_th",
                "suffix: rounds",
                "At 3 an alert fires: the client does not keep to T_th.",
                query(f"topk(12, fedel_client_over_budget_rounds{client})", "{{client}}"),
                steps=(("green", None), ("yellow", 1), ("red", 3)),
                low=0,
                high=5,
                size=(24, 10),
            ),
        ],
        [RUN, CLIENT],
    )
