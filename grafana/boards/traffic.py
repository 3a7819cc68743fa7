"""Which bytes are sent, and which are saved."""

from __future__ import annotations

from grafana.panels import CLIENT, RUN, Json, bars, dashboard, lines, query, stat


def board() -> Json:
    return dashboard(
        "fedel-bytes",
        "FedEL: bytes saved",
        "Clients send the tensors that they trained and receive the tensors that changed. Saved: the additional"
        " bytes that full models would have taken.",
        [
            stat(
                f"Saved {way}",
                "percentunit",
                f"Share of the full model's bytes that was not sent {way}, since the coordinator started.",
                f'run:fedel_bytes_saved:ratio{{run="$run", direction="{way}"}}',
                decimals=1,
                width=6,
            )
            for way in ("up", "down")
        ]
        + [
            stat(
                f"Sent {way}",
                "bytes",
                f"Bytes sent {way}, since the coordinator started.",
                f'fedel_bytes_sent_total{{run="$run", direction="{way}"}}',
                width=6,
            )
            for way in ("up", "down")
        ]
        + [
            lines(
                "Up: sent and saved",
                "bytes",
                "From clients to aggregators, since the coordinator started.",
                query('fedel_bytes_sent_total{run="$run", direction="up"}', "sent"),
                query('fedel_bytes_saved_total{run="$run", direction="up"}', "saved"),
                stacked=True,
                low=0,
            ),
            lines(
                "Down: sent and saved",
                "bytes",
                "From aggregators to clients, since the coordinator started.",
                query('fedel_bytes_sent_total{run="$run", direction="down"}', "sent"),
                query('fedel_bytes_saved_total{run="$run", direction="down"}', "saved"),
                stacked=True,
                low=0,
            ),
            bars(
                "Most sent",
                "bytes",
                "The 12 clients that sent the most.",
                query('topk(12, fedel_client_upload_bytes_total{run="$run", client=~"$client"})', "{{client}}"),
                low=0,
            ),
            bars(
                "Most received",
                "bytes",
                "The 12 clients that received the most.",
                query(
                    'topk(12, fedel_client_download_bytes_total{run="$run", client=~"$client"})', "{{client}}"
                ),
                low=0,
            ),
            lines(
                "At the aggregators",
                "Bps",
                "Bytes per second of all runs, counted by the aggregators, including retries.",
                query("sum(rate(fedel_upload_bytes_total[$__rate_interval]))", "updates received"),
                query("sum(rate(fedel_download_bytes_total[$__rate_interval]))", "models sent"),
                low=0,
                size=(24, 8),
            ),
        ],
        [RUN, CLIENT],
    )
