"""What training costs on devices with sensors: power, energy, temperature, memory."""

from __future__ import annotations

from grafana.panels import CLIENT, RUN, Json, bars, dashboard, lines, query, stat

_CLIENT = '{run="$run", client=~"$client"}'
_HOT = (("green", None), ("yellow", 75), ("red", 90))


def board() -> Json:
    return dashboard(
        "fedel-energy",
        "FedEL: energy",
        "Jetsons and machines with RAPL report their power, most devices report a temperature. Devices that"
        " report nothing are missing here. Measured during training only.",
        [
            stat(
                "Energy",
                "joule",
                "All clients that report it, since the coordinator started.",
                'run:fedel_client_energy_joules:sum{run="$run"}',
                width=6,
            ),
            stat(
                "Energy per round",
                "joule",
                "Mean over rounds, all clients that report it.",
                'run:fedel_client_energy_joules:sum{run="$run"} / on (run) sum by (run) (fedel_rounds_total)',
                width=6,
            ),
            stat(
                "Power while training",
                "watt",
                "Sum over the clients that report it, each while it trains.",
                'sum(fedel_client_power_watts{run="$run"})',
                width=6,
            ),
            stat(
                "Hottest device",
                "celsius",
                "Highest temperature in the last round.",
                'max(fedel_client_temperature_celsius{run="$run"})',
                _HOT,
                width=6,
            ),
            lines(
                "Power by client",
                "watt",
                "Mean power of each client while it trained in its last round.",
                query(f"fedel_client_power_watts{_CLIENT}", "{{client}}"),
                low=0,
            ),
            lines(
                "Temperature by client",
                "celsius",
                "Highest temperature while training. A device that throttles goes over T_th.",
                query(f"fedel_client_temperature_celsius{_CLIENT}", "{{client}}"),
                steps=_HOT,
            ),
            bars(
                "Energy by client",
                "joule",
                "The 12 clients that used the most, since the coordinator started.",
                query(f"topk(12, fedel_client_energy_joules_total{_CLIENT})", "{{client}}"),
                low=0,
            ),
            bars(
                "Peak memory by client",
                "bytes",
                "The 12 clients with the most resident memory while training.",
                query(f"topk(12, fedel_client_peak_memory_bytes{_CLIENT})", "{{client}}"),
                low=0,
            ),
        ],
        [RUN, CLIENT],
    )
