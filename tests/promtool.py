"""Where promtool is; tests that need it skip where it is not."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


def promtool() -> str:
    """Its path: beside this Python, where `make` puts it, or on the path."""
    beside = Path(sys.executable).parent / "promtool"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("promtool")
    if found is None:
        pytest.skip("there is no promtool: scripts/promtool.sh gets it from Debian's prometheus package")
    return found
