"""Do the clients keep T_th?"""

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
        "Training time over the time budget, minus one. 0 % is a client that uses its budget exactly.",
        [
            grid(
                "Deviation by client",
                "percentunit",
                "One row a client. Blue leaves half of its budget unused, green keeps it, yellow is over it,"
                " red is over it by more than 20 %. The first 1,000 clients of a run have a row.",
                query(f"fedel_client_budget_deviation_ratio{client}", "{{client}}"),
                steps=DEVIATION,
                size=(24, 14),
            ),
            histogram(
                "All clients and rounds",
                "percentunit",
                "How many client rounds deviated how much, of every client, also of those without a row above.",
                'sum by (le) (increase(fedel_budget_deviation_ratio_bucket{run="$run"}[$__rate_interval]))',
            ),
            lines(
                "By device type",
                "percentunit",
                "Median and 95th percentile of the last hour. Read from buckets, so it is rough.",
                query(
                    'run_device_type:fedel_budget_deviation_ratio:p50_1h{run="$run"}', "{{device_type}}, median"
                ),
                query(
                    'run_device_type:fedel_budget_deviation_ratio:p95_1h{run="$run"}', "{{device_type}}, 95th"
                ),
                steps=GOOD_IS_LOW,
                size=(12, 9),
            ),
            bars(
                "Furthest over T_th",
                "percentunit",
                "The 20 clients whose last round deviated most.",
                query(f"topk(20, fedel_client_budget_deviation_ratio{client})", "{{client}}"),
                steps=DEVIATION,
                low=-1,
                high=1,
            ),
            bars(
                "Rounds in a row over 1.2 T_th",
                "suffix: rounds",
                "At 3 an alert fires: the profile of the client no longer fits its device.",
                query(f"topk(20, fedel_client_over_budget_rounds{client})", "{{client}}"),
                steps=(("green", None), ("yellow", 1), ("red", 3)),
                low=0,
                high=5,
            ),
        ],
        [RUN, CLIENT],
    )
