from __future__ import annotations

from tests.services.coordinator.conftest import postgres_server as postgres_server
