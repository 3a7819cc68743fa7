"""The codec under atheris, which looks for inputs that reach new lines.

The first byte of an input says which target of the codec reads the rest. Needs ``pip install fedel[fuzz]``.
"""

from __future__ import annotations

import hashlib
import sys

import atheris

with atheris.instrument_imports(include=["fedel.wire", "fedel.types"]):
    from fedel.errors import FedelError
    from tests.fuzz.target import CORPUS, scratch
    from tests.fuzz.targets import CODEC, TARGETS

LONGEST_BYTES = 8_192


def main(runs: int, seed: int) -> None:
    folder = scratch()
    readers = [TARGETS[name].prepare(folder) for name in CODEC]
    start = folder / "start"
    start.mkdir()
    for number, name in enumerate(CODEC):
        for data in [*TARGETS[name].seeds(), *(path.read_bytes() for path in TARGETS[name].kept())]:
            whole = bytes([number]) + data
            (start / hashlib.sha256(whole).hexdigest()[:12]).write_bytes(whole)

    def one(data: bytes) -> None:
        if not data:
            return
        number = data[0] % len(CODEC)
        try:
            readers[number](data[1:])
        except FedelError:
            pass
        except Exception:
            path = CORPUS / CODEC[number] / hashlib.sha256(data[1:]).hexdigest()[:12]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data[1:])
            print(f"kept as {path}", flush=True)
            raise

    limits = [f"-max_len={LONGEST_BYTES}", "-timeout=5", "-rss_limit_mb=2048", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], f"-runs={runs}", f"-seed={seed}", "-verbosity=0", *limits, str(start)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
