"""The identity in a certificate, and the calls that each role may make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

from fedel.errors import CertificateError

AGENT, OPERATOR, VIEWER, SERVICE = ROLES = ("agent", "operator", "viewer", "service")
_SCHEME = "fedel://"
MAX_NAME = 200


@dataclass(frozen=True)
class Identity:
    """A role and a name; a certificate holds it as the only URI of its alternative names.

    >>> Identity("agent", "jetson 1").uri
    'fedel://agent/jetson%201'
    >>> Identity.parse("fedel://agent/jetson%201")
    Identity(role='agent', name='jetson 1')
    """

    role: str
    name: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise CertificateError(f"role '{self.role}': choose one of {', '.join(ROLES)}")
        if not (0 < len(self.name) <= MAX_NAME and self.name.isprintable()):
            raise CertificateError(f"name {self.name!r}: use 1 to {MAX_NAME} printable characters")

    def __str__(self) -> str:
        return f"{self.role} '{self.name}'"

    @property
    def uri(self) -> str:
        return f"{_SCHEME}{self.role}/{quote(self.name, safe='')}"

    @classmethod
    def parse(cls, uri: str) -> Identity:
        role, slash, name = uri.removeprefix(_SCHEME).partition("/")
        if not uri.startswith(_SCHEME) or not slash:
            raise CertificateError(f"'{uri}' is not a FedEL identity such as fedel://agent/NAME")
        return cls(role, unquote(name))


def _calls(service: str, rules: Mapping[str, tuple[str, ...]]) -> dict[str, frozenset[str]]:
    return {f"/{service}/{method}": frozenset(roles) for method, roles in rules.items()}


_READERS = (OPERATOR, VIEWER)
RULES: Mapping[str, frozenset[str]] = {
    **_calls(
        "fedel.v1.CoordinatorService",
        {
            "Session": (AGENT,),
            "CreateRun": (OPERATOR,),
            "ControlRun": (OPERATOR,),
            "DeleteRuns": (OPERATOR,),
            "GetResult": _READERS,
            "ListRuns": _READERS,
            "WatchRun": _READERS,
            "ListAggregators": (*_READERS, AGENT),
            "ListAgents": _READERS,
            "ControlAgent": (OPERATOR,),
            "PlanRun": (OPERATOR,),
        },
    ),
    **_calls(
        "fedel.v1.AggregatorService",
        {
            "CreateModel": (OPERATOR,),
            "GetModel": (AGENT, OPERATOR, SERVICE),
            "PutUpdate": (AGENT,),
            "OpenRound": (SERVICE,),
            "SealRound": (SERVICE,),
            "CommitRound": (SERVICE,),
            "KeepVersion": (SERVICE,),
            "EndRun": (SERVICE,),
            "DeleteRun": (SERVICE,),
        },
    ),
    **_calls("fedel.v1.CodeService", {"PutCode": (OPERATOR,), "GetCode": (AGENT, OPERATOR)}),
    # Enrol is not here: it has a separate port, for callers that have no certificate yet.
    **_calls("fedel.v1.EnrolmentService", {"Renew": ROLES, "GetRevocationList": (SERVICE,)}),
    **_calls("grpc.health.v1.Health", {"Check": ROLES, "Watch": ROLES, "List": ROLES}),
    **_calls("grpc.reflection.v1alpha.ServerReflection", {"ServerReflectionInfo": ROLES}),
}
"""The roles that may make each call. A call that is not listed here is refused for every role."""
