"""Selectors choose agents by their labels, their names and their device types."""

import pytest

from fedel.errors import ConfigError
from fedel.job import RunConfig
from fedel.selectors import MAX_LABELS, MAX_SELECTOR, Selector, objection_to_labels

AGENTS = {
    "roof-1": ("jetson-orin", {"gpu": "orin", "site": "roof"}),
    "roof-2": ("jetson-orin", {"gpu": "orin", "site": "roof", "broken": "fan"}),
    "lab-1": ("jetson-orin", {"gpu": "orin", "site": "lab"}),
    "desk": ("linux-x86_64", {}),
}


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("", ["roof-1", "roof-2", "lab-1", "desk"]),
        ("  ", ["roof-1", "roof-2", "lab-1", "desk"]),
        ("gpu=orin", ["roof-1", "roof-2", "lab-1"]),
        ("gpu=orin,site!=lab", ["roof-1", "roof-2"]),
        ("site!=lab", ["roof-1", "roof-2", "desk"]),
        ("gpu", ["roof-1", "roof-2", "lab-1"]),
        ("!gpu", ["desk"]),
        (" gpu = orin , ! broken ", ["roof-1", "lab-1"]),
        ("name=desk", ["desk"]),
        ("name!=desk,device=jetson-orin", ["roof-1", "roof-2", "lab-1"]),
        ("gpu=orin,gpu=nano", []),
    ],
)
def test_all_conditions_hold(text: str, chosen: list[str]) -> None:
    selector = Selector.parse(text)
    assert chosen == [
        name for name, (device, labels) in AGENTS.items() if selector.matches(name, device, labels)
    ]


@pytest.mark.parametrize(
    "text", ["gpu=", "=orin", "gpu=orin,,", ",", "gpu==orin", "gpu=a=b", "!gpu=orin", "g pu", "!", "a!b", "x!="]
)
def test_what_is_no_condition_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="key=value, key!=value, key or !key"):
        Selector.parse(text)


def test_a_selector_is_bounded() -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_SELECTOR}"):
        Selector.parse("a," * MAX_SELECTOR)


def test_a_job_with_a_wrong_selector_is_refused_with_the_key() -> None:
    assert "gpu=orin" == RunConfig.parse({"clients": "gpu=orin"}).clients
    with pytest.raises(ConfigError, match=r"clients = 'gpu=': 'gpu=' is no condition"):
        RunConfig.parse({"clients": "gpu="})


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({}, ""),
        ({"gpu": "orin", "example.org/site": "roof top 3"}, ""),
        ({"": "x"}, "a key has 1 to 63"),
        ({"a b": "x"}, "a key has 1 to 63"),
        ({"a" * 64: "x"}, "a key has 1 to 63"),
        ({"gpu": ""}, "its value has 1 to 200"),
        ({"gpu": "a,b"}, "its value has 1 to 200"),
        ({"gpu": "x" * 201}, "its value has 1 to 200"),
        ({"gpu": "a\x1b[2J"}, "its value has 1 to 200"),
        ({"device": "x"}, "taken by the agent's own device type"),
        ({str(n): "x" for n in range(MAX_LABELS + 1)}, f"more than {MAX_LABELS}"),
    ],
)
def test_labels_are_bounded(labels: dict[str, str], said: str) -> None:
    found = objection_to_labels(labels)
    assert said in found
    assert bool(said) == bool(found)


def test_every_label_can_be_selected() -> None:
    for value in ("roof top 3", "a-b_c/d", "10.0.0.1:80"):
        assert "" == objection_to_labels({"site": value})
        assert Selector.parse(f"site={value}").matches("a", "b", {"site": value})
