"""All errors that FedEL shows to users. Each message says what happened, where, and what to do next.

FedelError
|-- ConfigError            a configuration file, key or value                         exit code 2
|-- DataError              a data set is missing, damaged or of another format        exit code 3
|-- ModelError             a model cannot be split into blocks, or does not match     exit code 4
|-- ProfileError           a timing profile is missing, damaged or of another model   exit code 5
|-- UpdateRefused          an update cannot be used; has a short reason for metrics   exit code 6
|   `-- VersionRefused     updates that passed by themselves fold to no sound model   exit code 6
|-- ServiceError           a service cannot start, be reached, or continue            exit code 7
`-- CertificateError       a certificate, key or token is missing, wrong or expired   exit code 8
"""

from __future__ import annotations


class FedelError(Exception):
    """Base class of all; ``exit_code`` is the exit code of the command line."""

    exit_code = 1


class ConfigError(FedelError):
    exit_code = 2


class DataError(FedelError):
    exit_code = 3


class ModelError(FedelError):
    exit_code = 4


class ProfileError(FedelError):
    exit_code = 5


class UpdateRefused(FedelError):
    """``reason`` is one of a small set of words that can be a metric label: ``shape``, ``not_finite``, ..."""

    exit_code = 6

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class VersionRefused(UpdateRefused):
    """A round's updates fold to a model that is not finite: the version before it stays the newest."""


class ServiceError(FedelError):
    exit_code = 7


class CertificateError(FedelError):
    exit_code = 8
