"""Run the study."""

from __future__ import annotations

import sys

from ..report import main
from . import __doc__ as description
from .findings import findings

if __name__ == "__main__":
    sys.exit(main(findings, "partially_decomposable", description or "", None))
