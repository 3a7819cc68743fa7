import pytest

from fedel import config
from fedel.errors import ConfigError
from fedel.simulation.conditions import Faults, Link, Network
from tests.simulation.fakes import play, run_config, slowed
from tests.strategies.fakes import fleet, same_bits


def test_a_link_without_rates_takes_no_time():
    assert 0.0 == Link().seconds(10**9, 10**9)


def test_a_device_type_may_have_its_own_link():
    table = {"up_mbps": 8, "devices": {"xavier": {"up_mbps": 4}}}
    network = config.parse(Network, table, "[network]")
    assert (1.0, 2.0) == (
        network.link("orin").seconds(1_000_000, 0),
        network.link("xavier").seconds(1_000_000, 0),
    )


def test_drift_reaches_its_share_of_the_devices_and_only_after_its_start():
    faults = Faults(drift_factor=2.0, drift_share=0.3, drift_start=5, drift_rounds=10)
    names = [f"client-{i}" for i in range(400)]
    assert {1.0} == {faults.drift(1, 5, name) for name in names}
    assert {1.0, 1.5} == {faults.drift(1, 10, name) for name in names}
    assert 0.3 == pytest.approx(sum(faults.drift(1, 99, name) == 2.0 for name in names) / 400, abs=0.07)


def test_drop_outs_come_as_often_as_they_should_and_by_the_seed():
    faults = Faults(dropout=0.2)
    drawn = [faults.drops_out(1, r, f"client-{i}") for r in range(20) for i in range(20)]
    assert 0.2 == pytest.approx(sum(drawn) / 400, abs=0.06)
    assert drawn == [faults.drops_out(1, r, f"client-{i}") for r in range(20) for i in range(20)]
    assert drawn != [faults.drops_out(2, r, f"client-{i}") for r in range(20) for i in range(20)]


@pytest.mark.parametrize(
    "table", [{"dropout": 1.5}, {"drift_share": -1.0}, {"drift_factor": 0.0}, {"drift_rounds": 0}]
)
def test_impossible_faults_are_refused(table):
    with pytest.raises(ConfigError, match=next(iter(table))):
        config.parse(Faults, table, "[faults]")


def test_a_round_with_a_drop_out_lasts_until_its_deadline():
    played = play(run_config("fedavg", num_rounds=12), slowed((1, 2, 3, 4)), faults=Faults(dropout=0.1))
    waited = [record for record in played.records if record.dropped]
    smooth = [record for record in played.records if not record.dropped]
    assert waited
    assert smooth
    for record in waited:
        assert pytest.approx(8 * 1.516) == record.latency_seconds == record.deadline_seconds
        assert 4 - len(record.dropped) == record.num_updates
    for record in smooth:
        assert pytest.approx(6.064) == record.latency_seconds


def test_a_dropped_client_goes_on_from_the_round_that_last_counted():
    """A window slides only after rounds that counted."""
    run = run_config("fedel", num_rounds=10)
    played = play(run, slowed((1, 4)), faults=Faults(dropout=0.4))
    undisturbed = play(run, slowed((1, 4)))

    def windows(records):
        return [entry.window for record in records for entry in record.clients if "1" in entry.client]

    assert any("client-1" in record.dropped for record in played.records)
    fronts = [front for _, front in windows(undisturbed.records)]
    seen = [front for _, front in windows(played.records)]
    assert fronts[: len(seen)] == seen


def test_a_round_in_which_everyone_drops_out_changes_nothing():
    played = play(run_config("fedel", num_rounds=3), fleet(4), faults=Faults(dropout=1.0))
    untouched = play(run_config("fedel", num_rounds=3), fleet(4), stop_after=0)
    assert same_bits(untouched.model, played.model)
    assert [0, 0, 0] == [record.num_updates for record in played.records]
    assert [None] * 3 == [record.loss for record in played.records]


def test_heat_shows_in_the_clock_but_not_in_what_the_strategy_plans():
    run = run_config("fedel", num_rounds=5)
    cool = play(run, fleet(4))
    hot = play(run, fleet(4), faults=Faults(drift_factor=3.0, drift_rounds=4))
    assert same_bits(cool.model, hot.model)
    ratios = [h.latency_seconds / c.latency_seconds for h, c in zip(hot.records, cool.records, strict=True)]
    assert pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0]) == ratios
    one, other = hot.records[4].clients[0], cool.records[4].clients[0]
    assert one.predicted_seconds == other.predicted_seconds
    assert pytest.approx(3 * (1 + other.deviation)) == 1 + one.deviation
