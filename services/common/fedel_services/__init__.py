"""What the coordinator and the aggregator share: starting, listening, access, errors, metrics."""

import os

# numpy's BLAS looks at it once, when it is loaded. Its threads would spin after every product at a round's end,
# which made that 13 times as expensive (docs/LOG.md).
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fedel.wire  # noqa: F401  before gRPC: see there
