from __future__ import annotations

from pathlib import Path

import pytest
from fedel_edge.device import Meter, Rails, Rapl, Usage, facts, peak_memory_bytes, temperature_celsius


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


ORIN_NANO = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "proc/meminfo": "MemTotal:        7802952 kB\nMemFree:  1 kB",
    "proc/self/status": "Name:\tpython\nVmHWM:\t  2048 kB",
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/name": "ina3221",
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/in1_label": "VDD_IN",
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/in1_input": 5000,
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/curr1_input": 1400,
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/in2_label": "VDD_CPU_GPU_CV",
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/in2_input": 5000,
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/curr2_input": 600,
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/in7_label": "sum of shunt voltages",
    "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/in7_input": 20,
    "sys/class/thermal/thermal_zone0/temp": 48500,
    "sys/class/thermal/thermal_zone1/temp": 51250,
    "sys/class/thermal/thermal_zone2/temp": -256000,
    "sys/class/thermal/thermal_zone3/temp": "",
}


def test_jetson_facts(tmp_path: Path) -> None:
    found = facts(tree(tmp_path, ORIN_NANO))
    assert "jetson-orin-nano-developer-kit" == found.device_type
    assert 7802952 * 1024 == found.memory_bytes
    assert 2048 * 1024 == peak_memory_bytes(tmp_path)


def test_device_without_sensors(tmp_path: Path) -> None:
    assert facts(tmp_path).device_type
    assert 0 == facts(tmp_path).memory_bytes == peak_memory_bytes(tmp_path)
    assert temperature_celsius(tmp_path) is None
    assert not Rails(tmp_path)
    assert not Rapl(tmp_path)
    with Meter(tmp_path) as meter:
        pass
    assert Usage() == meter.usage


def test_power_of_the_feeding_rail(tmp_path: Path) -> None:
    assert pytest.approx(7.0) == Rails(tree(tmp_path, ORIN_NANO)).watts()


def test_power_is_a_sum_without_a_feeding_rail(tmp_path: Path) -> None:
    folder = "sys/class/hwmon/hwmon4"
    tree(
        tmp_path,
        {
            f"{folder}/name": "ina3221",
            f"{folder}/power1_label": "GPU",
            f"{folder}/power1_input": 2_500_000,
            f"{folder}/power2_label": "CPU",
            f"{folder}/power2_input": 1_500_000,
            "sys/class/hwmon/hwmon5/name": "amdgpu",
            "sys/class/hwmon/hwmon5/power1_input": 90_000_000,
        },
    )
    assert pytest.approx(4.0) == Rails(tmp_path).watts()


def test_monitor_listed_twice_counts_once(tmp_path: Path) -> None:
    tree(tmp_path, ORIN_NANO)
    (tmp_path / "sys/class/hwmon").mkdir(parents=True)
    there = tmp_path / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1"
    (there / "in1_label").write_text("VDD_SOMETHING\n")
    (tmp_path / "sys/class/hwmon/hwmon1").symlink_to(there)
    assert pytest.approx(7.0 + 3.0) == Rails(tmp_path).watts()


def test_older_jetson_reports_milliwatts(tmp_path: Path) -> None:
    folder = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    tree(
        tmp_path,
        {
            f"{folder}/rail_name_0": "POM_5V_IN",
            f"{folder}/in_power0_input": 4200,
            f"{folder}/rail_name_1": "POM_5V_GPU",
            f"{folder}/in_power1_input": 1000,
        },
    )
    assert pytest.approx(4.2) == Rails(tmp_path).watts()


def test_rapl_counter_wraps(tmp_path: Path) -> None:
    folder, now = "sys/class/powercap", [0.0]
    tree(
        tmp_path,
        {
            f"{folder}/intel-rapl:0/energy_uj": 9_000_000,
            f"{folder}/intel-rapl:0/max_energy_range_uj": 10_000_000,
            f"{folder}/intel-rapl:0:0/energy_uj": 1,
            f"{folder}/intel-rapl:1/energy_uj": 0,
        },
    )
    rapl = Rapl(tmp_path, lambda: now[0])
    now[0] = 2.0
    tree(
        tmp_path, {f"{folder}/intel-rapl:0/energy_uj": 3_000_000, f"{folder}/intel-rapl:1/energy_uj": 2_000_000}
    )
    assert pytest.approx((4.0 + 2.0) / 2) == rapl.watts()


def test_temperature_of_the_hottest_plausible_zone(tmp_path: Path) -> None:
    assert 51.25 == temperature_celsius(tree(tmp_path, ORIN_NANO))


def test_energy_and_highest_temperature(tmp_path: Path) -> None:
    tree(tmp_path, ORIN_NANO)
    now = [0.0]
    with Meter(tmp_path, every_seconds=3600.0, clock=lambda: now[0]) as meter:
        now[0] = 2.0
        meter.look()
        tree(
            tmp_path,
            {
                "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/curr1_input": 2800,
                "sys/class/thermal/thermal_zone1/temp": 40000,
            },
        )
        now[0] = 3.0
    assert pytest.approx(7.0 * 2 + 14.0) == meter.usage.joules
    assert pytest.approx(28.0 / 3) == meter.usage.watts
    assert 51.25 == meter.usage.celsius


def test_meter_samples_by_itself(tmp_path: Path) -> None:
    class Watched(Meter):
        def look(self) -> None:
            super().look()
            looks.append(1)
            if len(looks) == 3:
                self._done.set()

    looks: list[int] = []
    with Watched(tree(tmp_path, ORIN_NANO), every_seconds=0.001) as meter:
        meter._thread.join(10)
    assert 4 == len(looks)
