"""The window of each client: blocks over time."""

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
                "Last block of the window (front)",
                "prefix:block ",
                "One row per client, coloured by the last block of its window; the exit is after this block.",
                query(f"fedel_client_window_front_block{_CLIENT}", "{{client}}"),
                low=0,
                size=(12, 12),
            ),
            grid(
                "First block of the window (end)",
                "prefix:block ",
                "One row per client, coloured by the first block of its window; blocks before it are frozen.",
                query(f"fedel_client_window_end_block{_CLIENT}", "{{client}}"),
                low=0,
                size=(12, 12),
            ),
            grid(
                "Clients by last block",
                "suffix: clients",
                "One row per block: number of windows that end there. A window that does not move is a stripe.",
                query('count_values("block", fedel_client_window_front_block{run="$run"})', "block {{block}}"),
                low=0,
                size=(24, 8),
            ),
            lines(
                "Width of the window",
                "suffix: blocks",
                "Number of blocks in the window. Fast devices have wide windows.",
                query(
                    f"fedel_client_window_front_block{_CLIENT} - fedel_client_window_end_block{_CLIENT} + 1",
                    "{{client}}",
                ),
                low=0,
            ),
            lines(
                "Restarts of the window",
                "suffix: times",
                "Each restart means one pass over the whole model.",
                query(f"fedel_client_window_resets{_CLIENT}", "{{client}}"),
                low=0,
            ),
            folded(
                "One panel per selected client",
                band(
                    "$client",
                    "prefix:block ",
                    "The blocks that this client trains, from the first to the last block of its window.",
                    query(f"fedel_client_window_end_block{_CLIENT}", "end"),
                    query(f"fedel_client_window_front_block{_CLIENT}", "front"),
                    repeat="client",
                    low=0,
                ),
            ),
        ],
        [RUN, CLIENT],
    )
