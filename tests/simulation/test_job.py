import pytest

from fedel.config import tomllib, write
from fedel.errors import ConfigError
from fedel.simulation.job import SimulationConfig
from fedel.strategies import build
from fedel.strategies.base import PAPER_CLOCK, clock_of


def test_a_job_survives_being_written_and_read():
    job = SimulationConfig.parse(
        {"seed": 3, "fleet": {"counts": {"orin": 2, "orin/4": 3}}, "faults": {"dropout": 0.1}}
    )
    assert job == SimulationConfig.parse(tomllib.loads(write(job.table())))


def test_the_example_is_valid(request):
    path = request.config.rootpath / "configs" / "simulation.toml"
    job = SimulationConfig.parse(tomllib.loads(path.read_text()), str(path))
    assert (20, 0) == (job.partition.num_clients, job.run.rounds.num_participants)


def test_counts_give_the_number_of_clients():
    assert 5 == SimulationConfig.parse({"fleet": {"counts": {"orin": 2, "xavier": 3}}}).partition.num_clients


def test_virtual_rounds_have_no_shortest_deadline_unless_one_is_set():
    assert 0.0 == SimulationConfig.parse({}).run.rounds.deadline_floor_seconds
    assert (
        9.0
        == SimulationConfig.parse({"rounds": {"deadline_floor_seconds": 9.0}}).run.rounds.deadline_floor_seconds
    )


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"flet": {}}, "unknown key 'flet'; did you mean 'fleet'"),
        ({"rouns": {}}, "did you mean 'rounds'"),
        ({"scope": "forward"}, "scope = 'forward' is not one of"),
        ({"compute": "faster"}, "compute = 'faster' is not one of: exact, fast"),
        ({"scope": "train", "strategy": {"name": "fedel", "budget_scope": "backward"}}, "remove one of them"),
        ({"scope": "train", "strategy": {"name": "fedl"}}, "did you mean 'fedel'"),
        ({"fleet": {"counts": {"orin": 2}}, "partition": {"num_clients": 3}}, "adds up to 2 devices"),
        ({"partition": {"alhpa": 1.0}}, "did you mean 'alpha'"),
    ],
)
def test_mistakes_name_the_file_and_the_remedy(table, words):
    with pytest.raises(ConfigError, match=words) as error:
        SimulationConfig.parse(table, "job.toml")
    assert "job.toml" in str(error.value)


@pytest.mark.parametrize(
    ("strategy", "scope", "driving"),
    [
        ({"name": "fedel"}, "", "backward"),
        ({"name": "fedel", "budget_scope": "train"}, "", "train"),
        ({"name": "fedavg"}, "", "backward"),
        ({"name": "fedavg"}, "train", "train"),
        ({"name": "fedprox", "base": {"name": "fedel"}}, "train", "train"),
        ({"name": "fednova"}, "train", "train"),
    ],
)
def test_one_setting_chooses_the_clock_of_every_method(strategy, scope, driving):
    job = SimulationConfig.parse({"strategy": strategy, **({"scope": scope} if scope else {})})
    assert driving == clock_of(build(job.run.strategy), job.scope or PAPER_CLOCK)
