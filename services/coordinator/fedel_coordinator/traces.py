"""Sends one OpenTelemetry trace per closed round to a collector, over OTLP; off unless ``traces`` is set."""

from __future__ import annotations

import logging
from typing import Any

from fedel import __version__
from fedel.errors import ConfigError
from fedel.records import RoundRecord
from fedel_coordinator.round_spans import Span, spans_of

log = logging.getLogger(__name__)
TIMEOUT_SECONDS = 5.0
MAX_WAITING = 1 << 14
"""Spans that wait to be sent; further ones are dropped, because no round waits for a collector."""


class Traces:
    def __init__(self, address: str) -> None:
        """``address`` is ``http://host:port`` of a collector, or ``https://`` with TLS."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"traces = {address!r} needs OpenTelemetry ({error}): pip install 'fedel[otel]'"
            ) from None
        resource = Resource.create({"service.name": "fedel-coordinator", "service.version": __version__})
        exporter = OTLPSpanExporter(
            endpoint=address, insecure=address.startswith("http://"), timeout=TIMEOUT_SECONDS
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING))
        self._tracer = self._provider.get_tracer("fedel", __version__)

    def round_closed(self, run: str, record: RoundRecord) -> None:
        """Queue the spans of a round; they are sent by a thread of their own."""
        self._add(spans_of(run, record), None)

    def close(self) -> None:
        """Send what waits, if the collector takes it soon."""
        self._provider.force_flush(int(1000 * TIMEOUT_SECONDS))
        self._provider.shutdown()

    def _add(self, span: Span, parent: Any) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(parent) if parent is not None else Context()
        start, end = _nanoseconds(span.start), _nanoseconds(span.start + span.seconds)
        made = self._tracer.start_span(span.name, inside, attributes=dict(span.attributes), start_time=start)
        for event in span.events:
            about = {key: value for key, value in event.items() if key != "name"}
            made.add_event(str(event["name"]), about, end)
        for child in span.children:
            self._add(child, made)
        made.end(end)


def traces_to(address: str) -> Traces | None:
    """``None`` where no traces are wanted."""
    if not address:
        return None
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"traces = {address!r}: write http://host:4317, or https:// for a collector with TLS")
    return Traces(address)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
