"""What loading a model leaves in memory: its weights and its vocabulary, and little more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STATUS = Path("/proc/self/status")
LITTLE = 0.2  # of the weights: what measuring left, the ends of huge pages
PROGRAM = """
import sys
from pathlib import Path
import gguf, tokenizers
from kvstrata import EngineConfig, kernels
from kvstrata.engine.build import build
from kvstrata.models.source import load_tokenizer, open_source

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

kernels.backend()
before = anonymous()
"""
WHOLE = """
loaded = build(EngineConfig(model=sys.argv[1], kv_memory=16 << 20, threads=1))
print(anonymous() - before - loaded.weights_bytes - loaded.pool_bytes, loaded.weights_bytes)
"""
VOCABULARY = """
source = open_source(Path(sys.argv[1]))
tokenizer = load_tokenizer(source, Path(sys.argv[1]))
source.close()
del source
kernels.keep_freed_memory()
print(anonymous() - before, 0)
"""


def grown(program: str, model: Path) -> tuple[int, int]:
    """What a program left in memory besides the weights, and the weights, in bytes."""
    command = [sys.executable, "-c", PROGRAM + program, str(model)]
    beside, weights = subprocess.run(command, check=True, capture_output=True, timeout=300).stdout.split()
    return int(beside), int(weights)


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")
def test_what_packing_freed_goes_back_to_the_system(smollm2_path: Path) -> None:
    beside, weights = grown(WHOLE, smollm2_path)
    vocabulary, _ = grown(VOCABULARY, smollm2_path)
    assert beside - vocabulary <= LITTLE * weights
