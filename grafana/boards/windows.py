"""The window of each client: blocks against time."""

from __future__ import annotations

from grafana.panels import CLIENT, RUN, Json, band, dashboard, folded, grid, lines, query

_CLIENT = '{run="$run", client=~"$client"}'


def board() -> Json:
    return dashboard(
        "fedel-windows",
        "FedEL: window map",
        "The window of each client slides from the first block to the last, then starts again. Block 1 is at"
        " the input; 0 means that the method has no window.",
        [
            grid(
                "Deep edge of the window (front)",
                "prefix:block ",
                "One row per client, coloured by the last block of its window; the client exits after it.",
                query(f"fedel_client_window_front_block{_CLIENT}", "{{client}}"),
                low=0,
                size=(12, 12),
            ),
            grid(
                "Shallow edge of the window (end)",
                "prefix:block ",
                "One row per client, coloured by the first block that it trains; blocks before it are frozen.",
                query(f"fedel_client_window_end_block{_CLIENT}", "{{client}}"),
                low=0,
                size=(12, 12),
            ),
            grid(
                "Clients by deep edge",
                "suffix: clients",
                "One row per block: how many windows end there. A window that does not move is a stripe.",
                query('count_values("block", fedel_client_window_front_block{run="$run"})', "block {{block}}"),
                low=0,
                size=(24, 8),
            ),
            lines(
                "Width of the window",
                "suffix: blocks",
                "Blocks between its edges, both counted. Fast devices have wide windows.",
                query(
                    f"fedel_client_window_front_block{_CLIENT} - fedel_client_window_end_block{_CLIENT} + 1",
                    "{{client}}",
                ),
                low=0,
            ),
            lines(
                "Times the window started again",
                "suffix: times",
                "Each is one pass over the whole model.",
                query(f"fedel_client_window_resets{_CLIENT}", "{{client}}"),
                low=0,
            ),
            folded(
                "A panel for each client chosen above",
                band(
                    "$client",
                    "prefix:block ",
                    "The blocks that this client trains, from the shallow edge to the deep one.",
                    query(f"fedel_client_window_end_block{_CLIENT}", "end"),
                    query(f"fedel_client_window_front_block{_CLIENT}", "front"),
                    repeat="client",
                    low=0,
                ),
            ),
        ],
        [RUN, CLIENT],
    )
