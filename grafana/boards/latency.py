"""Where the seconds of a round go."""

from __future__ import annotations

from grafana.panels import CLIENT, RUN, Json, dashboard, histogram, lines, query, stat


def board() -> Json:
    return dashboard(
        "fedel-latency",
        "FedEL: round latency by phase",
        "Where the seconds of a round go. Phases of different clients overlap; the longest one is shown.",
        [
            stat(
                "Last round",
                "s",
                "Seconds from the first task of the last round to its new model.",
                'fedel_round_last_latency_seconds{run="$run"}',
                width=6,
            ),
            stat(
                "Median, last hour",
                "s",
                "Half of the rounds in the last hour were faster. Computed from buckets, so approximate.",
                'run:fedel_round_latency_seconds:p50_1h{run="$run"}',
                width=6,
            ),
            stat(
                "95th percentile, last hour",
                "s",
                "One of twenty rounds in the last hour was slower. Computed from buckets, so approximate.",
                'run:fedel_round_latency_seconds:p95_1h{run="$run"}',
                width=6,
            ),
            stat(
                "Deadline",
                "s",
                "Seconds after which the open round may close without all clients.",
                'fedel_round_deadline_seconds{run="$run"}',
                width=6,
            ),
            lines(
                "Seconds by phase",
                "s",
                "The phases of the last round: download, probe, train, wait (for a permit) and upload on the"
                " slowest device; fold (aggregation) and commit on the servers; evaluate, beside the next.",
                query('fedel_round_phase_seconds{run="$run"}', "{{phase}}"),
                stacked=True,
                low=0,
                size=(24, 10),
            ),
            histogram(
                "Rounds by latency",
                "s",
                "Number of rounds by duration.",
                'sum by (le) (increase(fedel_round_latency_seconds_bucket{run="$run"}[$__rate_interval]))',
            ),
            lines(
                "Open round against its deadline",
                "s",
                "Seconds since the open round began (0 between rounds), and its deadline.",
                query('run:fedel_round_open_seconds:max{run="$run"}', "open for"),
                query('fedel_round_deadline_seconds{run="$run"}', "deadline"),
                low=0,
                size=(12, 9),
            ),
            lines(
                "Measured training seconds",
                "s",
                "Training seconds of each client in its last round.",
                query('fedel_client_train_seconds{run="$run", client=~"$client"}', "{{client}}"),
                low=0,
            ),
            lines(
                "Measured against planned",
                "percentunit",
                "Measured training seconds divided by the prediction of the timing profile, minus one. A client"
                " far from 0 should measure its profile again.",
                query(
                    'fedel_client_train_seconds{run="$run", client=~"$client"}'
                    ' / fedel_client_planned_seconds{run="$run", client=~"$client"} - 1',
                    "{{client}}",
                ),
            ),
        ],
        [RUN, CLIENT],
    )
