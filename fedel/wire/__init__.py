"""The only place that knows both our types and protobuf."""
