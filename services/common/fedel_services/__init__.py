"""What the coordinator and the aggregator share: starting, listening, access, errors, metrics."""
