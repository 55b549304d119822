"""The systemd unit as systemd reads it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "kvstrata.service"


def test_systemd_takes_the_unit_without_a_warning(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    # The program of the unit is not installed here.
    text = UNIT.read_text().replace("/opt/kvstrata/venv/bin/kvstrata", "/bin/true")
    assert "/bin/true serve" in text
    copy = tmp_path / UNIT.name
    copy.write_text(text)
    done = subprocess.run(
        [analyze, "verify", str(copy)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
