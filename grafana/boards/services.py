"""Health of coordinator and aggregators."""

from __future__ import annotations

from grafana.panels import Json, bars, dashboard, lines, query, stat

_OURS = '{job=~"fedel-.+"}'
_DISK = (("red", None), ("yellow", 0.1), ("green", 0.2))


def _quantile(metric: str) -> str:
    return f"histogram_quantile(0.95, sum by (le) (rate({metric}_bucket[$__rate_interval])))"


def board() -> Json:
    return dashboard(
        "fedel-services",
        "FedEL: service health",
        "Coordinator and aggregators: uploads, disk, CPU and memory. All runs together.",
        [
            stat(
                "Services up",
                "percentunit",
                "Share of the scraped processes that answer.",
                f"avg(up{_OURS})",
                (("red", None), ("green", 1)),
                width=6,
            ),
            stat(
                "Versions",
                "suffix: processes",
                "Processes by FedEL version. Several versions after an upgrade: one process was not restarted.",
                "count by (version) (fedel_build_info)",
                legend="{{version}}",
                width=6,
            ),
            stat(
                "Agents connected",
                "suffix: agents",
                "Agents with an open session.",
                "sum(fedel_sessions)",
                (("red", None), ("green", 1)),
                width=6,
            ),
            stat(
                "Room on disk",
                "percentunit",
                "Free share of the fullest file system with models and journals. An alert fires below 10 %.",
                "min(instance:fedel_disk_free:ratio)",
                _DISK,
                width=6,
            ),
            lines(
                "Uploads by outcome",
                "ops",
                "Uploads per second: accepted, duplicate after a retry, refused, or broken in transfer.",
                query("sum by (outcome) (rate(fedel_uploads_total[$__rate_interval]))", "{{outcome}}"),
                stacked=True,
                low=0,
            ),
            bars(
                "Refused by reason",
                "suffix: uploads",
                "Uploads refused in the time shown, the ten most frequent reasons. late, sealed, early, idle"
                " and superseded are normal; the others are errors.",
                query(
                    "topk(10, sum by (reason) (increase(fedel_uploads_refused_total[$__range])))", "{{reason}}"
                ),
                steps=(("green", None), ("yellow", 1)),
                low=0,
                size=(12, 8),
            ),
            bars(
                "Messages refused by the coordinator",
                "suffix: messages",
                "In the time shown: sessions replaced by newer ones, wrong models, unexpected reports.",
                query("sum by (reason) (increase(fedel_messages_refused_total[$__range]))", "{{reason}}"),
                steps=(("green", None), ("yellow", 1)),
                low=0,
                size=(12, 8),
            ),
            lines(
                "Fold (aggregation) and commit",
                "s",
                "95th percentile of the seconds to add one update to the mean and to write a new version.",
                query(_quantile("fedel_fold_seconds"), "fold"),
                query(_quantile("fedel_commit_seconds"), "commit"),
                low=0,
            ),
            lines(
                "Upload permits",
                "suffix: uploads",
                "Uploads that are sending or waiting. If many wait for long, raise max_uploads or add an"
                " aggregator.",
                query("sum by (instance) (fedel_upload_permits_in_use)", "{{instance}} sending"),
                query("sum by (instance) (fedel_uploads_waiting)", "{{instance}} waiting"),
                low=0,
            ),
            lines(
                "Sessions",
                "suffix: agents",
                "Agents with an open session.",
                query("fedel_sessions", "{{instance}}"),
                low=0,
            ),
            lines(
                "Heartbeats and failed tasks",
                "ops",
                "Heartbeats per second, and failed tasks per second.",
                query("sum(rate(fedel_heartbeats_total[$__rate_interval]))", "heartbeats"),
                query("sum(rate(fedel_tasks_failed_total[$__rate_interval])) or vector(0)", "failed tasks"),
                low=0,
            ),
            lines(
                "Room on disk",
                "bytes",
                "Free space on the file systems with models and journals.",
                query("fedel_disk_free_bytes", "{{instance}} free"),
                low=0,
            ),
            lines(
                "Newest version of the model",
                "prefix:v",
                "On each aggregator. All shards of a run have the same version.",
                query("fedel_model_version", "{{run}} on {{instance}}"),
                low=0,
            ),
            lines(
                "CPU",
                "percentunit",
                "Cores in use by each process; 100 % is one core.",
                query(f"rate(process_cpu_seconds_total{_OURS}[$__rate_interval])", "{{job}} {{instance}}"),
                low=0,
            ),
            lines(
                "Memory",
                "bytes",
                "Resident memory of each process. An aggregator's does not grow with the number of clients.",
                query(f"process_resident_memory_bytes{_OURS}", "{{job}} {{instance}}"),
                low=0,
            ),
            lines(
                "Scrape",
                "s",
                "Seconds that Prometheus needs to scrape each process.",
                query(f"scrape_duration_seconds{_OURS}", "{{job}} {{instance}}"),
                low=0,
            ),
            lines(
                "Samples per scrape",
                "suffix: series",
                "Time series that each process exports; about 18 for each of the first 1,000 clients of a run.",
                query(f"scrape_samples_scraped{_OURS}", "{{job}} {{instance}}"),
                low=0,
                size=(24, 8),
            ),
        ],
        [],
    )
