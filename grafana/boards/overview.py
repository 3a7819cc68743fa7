"""Overview: does the run make progress, does it learn, do the clients stay within their budget."""

from __future__ import annotations

from grafana.panels import GOOD_IS_LOW, Json, dashboard, lines, query, stat


def board() -> Json:
    return dashboard(
        "fedel-overview",
        "FedEL: overview",
        "One run at a glance. The other dashboards are behind the menu at the top right.",
        [
            stat(
                "Open round",
                "prefix:round ",
                "Number of the open round, counted from 0.",
                'fedel_round_number{run="$run"}',
                decimals=0,
            ),
            stat(
                "Accuracy",
                "percentunit",
                "Test accuracy of the newest model that was tested.",
                'fedel_model_accuracy_ratio{run="$run"}',
                decimals=1,
            ),
            stat(
                "Last round",
                "s",
                "Seconds from the first task of the last round to its new model.",
                'fedel_round_last_latency_seconds{run="$run"}',
            ),
            stat(
                "T_th",
                "s",
                "The time budget of one training step, the same for every client.",
                'fedel_budget_seconds{run="$run"}',
            ),
            stat(
                "Worst client",
                "percentunit",
                "Largest time that counts, divided by T_th, minus one, in each client's last round.",
                'max(fedel_client_budget_deviation_ratio{run="$run"})',
                GOOD_IS_LOW,
                decimals=1,
            ),
            stat(
                "Uploads saved",
                "percentunit",
                "Share of bytes saved compared with sending full models.",
                'run:fedel_bytes_saved:ratio{run="$run", direction="up"}',
                decimals=1,
            ),
            stat(
                "Agents connected",
                "suffix: agents",
                "Agents with an open session, all runs.",
                "sum(fedel_sessions)",
                (("red", None), ("green", 1)),
                decimals=0,
            ),
            stat(
                "Alerts firing",
                "suffix: alerts",
                "FedEL alerts that are firing; docs/monitoring.md says what to do about each.",
                'count(ALERTS{alertname=~"Fedel.+", alertstate="firing"}) or vector(0)',
                (("green", None), ("red", 1)),
                decimals=0,
            ),
            lines(
                "Accuracy",
                "percentunit",
                "Test accuracy of the newest model that was tested.",
                query('fedel_model_accuracy_ratio{run="$run"}', "accuracy"),
                low=0,
                high=1,
            ),
            lines(
                "Loss",
                "none",
                "Cross-entropy in nats: mean over the clients in the last round, and on test data.",
                query('fedel_model_train_loss{run="$run"}', "training"),
                query('fedel_model_test_loss{run="$run"}', "test"),
            ),
            lines(
                "Accuracy on the clients' own data",
                "percentunit",
                "Of the samples that each client holds out: the mean over clients, the worst client, and the"
                " spread between them (standard deviation). Empty if the job has no such tests.",
                *(
                    query(f'fedel_clients_accuracy_ratio{{run="$run", statistic="{statistic}"}}', legend)
                    for statistic, legend in (("mean", "mean"), ("worst", "worst"), ("deviation", "spread"))
                ),
                low=0,
                high=1,
            ),
            lines(
                "Accuracy on own data by device type",
                "percentunit",
                "Mean over the clients of each type, to see whether the model is worse for one kind of device.",
                query('fedel_device_type_accuracy_ratio{run="$run"}', "{{device_type}}"),
                low=0,
                high=1,
            ),
            lines(
                "Round latency",
                "s",
                "Seconds of the last round, and seconds since the open round began (0 between rounds).",
                query('fedel_round_last_latency_seconds{run="$run"}', "last round"),
                query('run:fedel_round_open_seconds:max{run="$run"}', "open round"),
                low=0,
            ),
            lines(
                "Deviation from T_th",
                "percentunit",
                "Time that counts, divided by T_th, minus one, over all clients. Above 20 % is over budget.",
                query('max(fedel_client_budget_deviation_ratio{run="$run"})', "worst"),
                query('quantile(0.5, fedel_client_budget_deviation_ratio{run="$run"})', "median"),
                query('min(fedel_client_budget_deviation_ratio{run="$run"})', "fastest"),
                steps=GOOD_IS_LOW,
            ),
            lines(
                "Bytes",
                "Bps",
                "Bytes per second that clients send and receive, all clients of the run together.",
                query(
                    'sum by (direction) (rate(fedel_bytes_sent_total{run="$run"}[$__rate_interval]))',
                    "{{direction}}",
                ),
                low=0,
            ),
            lines(
                "Rounds closed",
                "suffix: rounds",
                "Rounds so far: complete, or partial if some clients did not report.",
                query('fedel_rounds_total{run="$run"}', "{{outcome}}"),
                stacked=True,
                low=0,
            ),
        ],
    )
