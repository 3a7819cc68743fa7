"""The only place that knows both our types and protobuf."""

import os

# gRPC looks at it once, when it is imported. Without it, a server writes a line for each handshake that fails,
# and anybody who reaches the port can fill its log.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
