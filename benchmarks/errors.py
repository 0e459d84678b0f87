"""What goes wrong with results."""

from __future__ import annotations

from ..registry.errors import TuneryError


class ResultError(TuneryError):
    """A result file or a folder of them cannot be used."""


class DamagedResultError(ResultError):
    """A result file is not what was written."""
