"""Code that came with a job: its modules are its own, whatever else is in the process."""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedel import plugins
from fedel.bundle import Bundle
from fedel.errors import ConfigError
from fedel.job_code import JobCode
from fedel.plugins import Allowed

OWN = """
from __future__ import annotations
import math
from dataclasses import dataclass
import nets.small
from helpers import VERSION
from nets import large as also

@dataclass(frozen=True)
class Thing:
    number: int = 1

def make():
    import helpers, nets.small as small
    from nets.large import late
    return VERSION, helpers.VERSION, small.NAME, nets.small.NAME, also.NAME, late(), math.pi > 3

def fail():
    raise RuntimeError("planted")
"""


LARGE = """
from . import small
from .small import NAME

def late():
    return small.NAME
"""


def files(version: int, **more: str) -> Bundle:
    return Bundle(
        {
            "own.py": OWN,
            "helpers.py": f"VERSION = {version}\n",
            "nets/__init__.py": "",
            "nets/small.py": f"NAME = 'small {version}'\n",
            "nets/large.py": LARGE,
            **{f"{name}.py": source for name, source in more.items()},
        }
    )


@contextmanager
def code_of(bundle: Bundle, scope: str = "run", signer: str = "operator:ada") -> Iterator[JobCode]:
    code = JobCode(bundle, signer, scope)
    try:
        yield code
    finally:
        code.close()


def found(code: JobCode, name: str = "own:make", allowed: Allowed | None = None):  # type: ignore[no-untyped-def]
    with plugins.only(allowed or Allowed(bundles=True), code):
        return plugins.load(name, "model", ConfigError)


def expected(version: int) -> tuple[object, ...]:
    small = f"small {version}"
    return version, version, small, small, small, small, True


def test_two_versions_do_not_mix_in_one_process() -> None:
    with code_of(files(1), "one") as one, code_of(files(2), "two") as two:
        first, second = found(one), found(two)
        results: dict[str, tuple[object, ...]] = {}

        def call(name: str, function: object) -> None:
            results[name] = function()  # type: ignore[operator]

        threads = [threading.Thread(target=call, args=pair) for pair in (("1", first), ("2", second)) * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {"1": expected(1), "2": expected(2)} == results
        assert found(one) is first


def test_the_same_version_in_two_runs_is_two_modules() -> None:
    with code_of(files(1), "one") as one, code_of(files(1), "two") as two:
        found(one).__globals__["VERSION"] = 7
        assert expected(1) == found(two)()


def test_nothing_of_it_can_be_imported_by_others() -> None:
    names = ("own", "helpers", "nets")
    before = [sys.modules.get(name) for name in names]
    with code_of(files(1)) as code:
        found(code)
        assert before == [sys.modules.get(name) for name in names]
        with (
            plugins.only(Allowed()),
            pytest.raises(ConfigError, match="does not allow jobs to run code of 'own'"),
        ):
            plugins.load("own:make", "model", ConfigError)


def test_it_goes_with_its_run() -> None:
    with code_of(files(1)) as code:
        make = found(code)
        assert any(name.startswith(code.package) for name in sys.modules)
    assert not any(name.startswith(code.package) for name in sys.modules)
    with pytest.raises(ModuleNotFoundError):
        make()


def test_it_hides_nothing_that_is_installed() -> None:
    """A module of the job that is called like an installed package is the job's alone."""
    with code_of(
        files(1, numpy="NAME = 'mine'\n", user="import numpy\ndef name():\n    return numpy.NAME\n")
    ) as code:
        assert "mine" == found(code, "user:name")()
        import numpy

        assert "numpy" == numpy.__name__
        assert "mine" != getattr(numpy, "NAME", "")


def test_errors_and_inspection_show_the_authors_lines() -> None:
    with code_of(files(1)) as code:
        fail = found(code, "own:fail")
        try:
            fail()
        except RuntimeError:
            text = traceback.format_exc()
        assert "/own.py" in text
        assert 'raise RuntimeError("planted")' in text
        assert "planted" in inspect.getsource(fail)
        assert "class Thing" in inspect.getsource(found(code, "own:Thing"))


def test_a_machine_takes_code_only_from_whom_its_owner_trusts() -> None:
    with code_of(files(1)) as code:
        for allowed in (Allowed(), Allowed(bundles=("operator:eve",)), Allowed(("own",))):
            with pytest.raises(ConfigError, match=r'put \[code\] bundles = \["operator:ada"\] into the config'):
                found(code, allowed=allowed)
        assert not any(name.startswith(code.package) for name in sys.modules), "imported before it was allowed"
        assert expected(1) == found(code, allowed=Allowed(bundles=("operator:eve", "operator:ada")))()


@pytest.mark.parametrize("bundles", [("ada",), ("agent:ada",), ("operator:",), ("",)])
def test_a_signer_is_written_as_operator_and_name(bundles: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="write it as operator:NAME"):
        Allowed(bundles=bundles)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken:make", "importing 'broken' failed: SyntaxError"),
        ("lacking:make", r"needs 'not_there', which is not installed; install it, or send it along \(--code\)"),
        ("own:nothing", "has no 'nothing'"),
        ("own.deeper:make", "no 'own.deeper' in the code that came with the job"),
        ("helpers:VERSION", "is a int; name a function"),
    ],
)
def test_what_is_wrong_with_it_is_said(name: str, words: str) -> None:
    bad = {"broken": "def make(:\n", "lacking": "import not_there\n"}
    with code_of(files(1, **bad)) as code, pytest.raises(ConfigError, match=words):
        found(code, name)
