"""What loading a model leaves in memory: its weights, and little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STATUS = Path("/proc/self/status")
POOL = 16 << 20
LITTLE = 0.25  # of the weights: the vocabulary, what measuring left, the ends of huge pages
PROGRAM = f"""
import json, sys
from pathlib import Path
import gguf, tokenizers
from kvstrata.engine.build import build
from kvstrata import EngineConfig

def anonymous():
    [line] = [line for line in Path("{STATUS}").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024

before = anonymous()
loaded = build(EngineConfig(model=sys.argv[1], kv_memory={POOL}, threads=1))
print(json.dumps([anonymous() - before, loaded.weights_bytes]))
"""


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")
def test_what_packing_freed_goes_back_to_the_system(smollm2_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(smollm2_path)], check=True, capture_output=True, timeout=300
    )
    grown, weights = json.loads(told.stdout)
    assert grown - POOL <= (1 + LITTLE) * weights
