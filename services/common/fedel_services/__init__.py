"""What the coordinator and the aggregator share: starting, listening, access, errors, metrics."""

import fedel.wire  # noqa: F401  before gRPC: see there
