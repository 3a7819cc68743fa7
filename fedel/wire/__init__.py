"""The only place that knows both our types and protobuf."""

import os

# gRPC looks at it once, when it is imported. Without it, a server writes a line for each handshake that fails,
# and anybody who reaches the port can fill its log.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# A server's connections are polled by the threads that wait for its calls. gRPC's event engine would hand every
# read over to a thread of its own, which costs a tenth more CPU (decision 21).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
