"""The method of a run that came with its job: found where the servers keep it, by the hash that the run names.

It is the code of an operator, and an audit has to run it, because the fold makes the versions. So a person
says that it may run here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fedel_aggregator.run_header import read_code_hash
from fedel_services.job_code import FolderShelf, load

from fedel import plugins
from fedel.audit.books import Books
from fedel.audit.findings import MISSING, Findings
from fedel.errors import ConfigError
from fedel.files import safe_name
from fedel.job_code import JobCode


@contextmanager
def known(
    run: str, data_dirs: Sequence[Path], books: Books | None, may_run: bool, findings: Findings
) -> Iterator[None]:
    """Inside, the name of the method is found, whether it came with the job or not."""
    code = _kept(run, data_dirs, findings) or (books.code if books is not None else None)
    if code is None:
        yield
        return
    with closing(code):
        must_run = books is None or books.config is None or _is_in(code, books.config.strategy)
        if must_run and not may_run:
            raise ConfigError(
                f"the method of run '{run}' came with the job, as code {code.bundle.sha256[:12]} of"
                f" {code.signer}: to compute the versions again, this code has to run here. If you trust it,"
                " say --run-code"
            )
        with plugins.only(None, code):
            yield


def _kept(run: str, data_dirs: Sequence[Path], findings: Findings) -> JobCode | None:
    """Aggregators have code only if the method is in it."""
    for data_dir in data_dirs:
        if sha256 := read_code_hash(data_dir / "runs" / safe_name(run)):
            try:
                return load(FolderShelf(data_dir / "code"), sha256, f"audit {run}")
            except ConfigError as error:
                findings.add(MISSING, data_dir / "code" / sha256, str(error))
    return None


def _is_in(code: JobCode, strategy: Mapping[str, Any]) -> bool:
    base = strategy.get("base")
    is_own = ":" in str(strategy.get("name")) and code.holds(str(strategy["name"]).partition(":")[0])
    return is_own or (isinstance(base, Mapping) and _is_in(code, base))
