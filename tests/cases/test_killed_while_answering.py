"""kill -9 of an engine that answers over a disk tier: published blocks are hits, and answers stay right."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prompts import ANSWER, TOKENS, prompt_of
from scale import scaled
from stored import folder_bytes

from kvstrata import LLM

SCRIPT = Path(__file__).with_name("answer_and_be_killed.py")
TESTS = SCRIPT.parent.parent
CAP = 48 << 20  # bytes: some 130 blocks, so that slots are reused too
LATEST = 20  # answers: what came before them may have been evicted


def answers_until_killed(
    model: Path, url: str, seed: int, seconds: float
) -> tuple[list[dict[str, Any]], float]:
    """What was answered, and when the process was killed, by the monotonic clock."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(model), url, str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    time.sleep(seconds)
    killed = time.monotonic()
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait(60) == -signal.SIGKILL
    return [json.loads(line) for line in rest.split("\n")[:-1]], killed


@pytest.mark.slow
def test_what_was_published_a_second_before_a_kill_is_a_hit(tmp_path: Path, smollm2_path: Path) -> None:
    url = f"disk://{tmp_path / 'store'}?size={CAP}"
    draw = random.Random(1)
    checked = 0
    for seed in range(scaled(20, 2)):
        given, killed = answers_until_killed(smollm2_path, url, seed, draw.uniform(1.0, 3.0))
        assert folder_bytes(tmp_path / "store") <= CAP
        with LLM(
            str(smollm2_path),
            kv_memory="16MiB",
            max_model_len=256,
            tiers=[url],
            threads=1,
            load_mode="always",
        ) as llm:
            for answer in given[-LATEST:]:
                [result] = llm.generate([prompt_of(answer["number"])], ANSWER)
                assert result.outputs[0].token_ids == answer["token_ids"]
                if killed - answer["at"] > 1.0 and not answer["dropped"]:
                    assert result.usage.cached_tokens == (TOKENS - 1) // 16 * 16, (seed, answer)
                    checked += 1
        assert folder_bytes(tmp_path / "store") <= CAP
    assert checked > 0
