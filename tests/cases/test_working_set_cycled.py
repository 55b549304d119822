"""A working set cycled under LRU: larger than the pool it thrashes, smaller it never does."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from promtool import promtool
from toy import make_toy

from kvstrata import SamplingParams

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCKS, BLOCK, PER_PROMPT = 60, 4, 6
ROUND_SECONDS = 60


def cycle(share: float, rounds: int = 8) -> tuple[int, int]:
    """Tokens computed again soon after eviction, and all that prefill computed after the first round."""
    toy = make_toy(blocks=BLOCKS, block_size=BLOCK, policy="lru")
    draw = random.Random(1)
    count = round(share * BLOCKS / PER_PROMPT)
    prompts = [draw.choices(range(1, 90), k=PER_PROMPT * BLOCK + 1) for _ in range(count)]
    told = toy.engine.telemetry
    computed = 0
    for number in range(rounds):
        for place, prompt in enumerate(prompts):
            toy.engine.add_request(f"{number}-{place}", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
            toy.run()
            toy.clock.now += ROUND_SECONDS / count
        if number == 0:
            computed = told.prefill_tokens
            assert told.blocks.thrashed == 0
    return told.blocks.thrashed, told.prefill_tokens - computed


def test_a_working_set_of_six_fifths_of_the_pool_is_computed_again_and_again():
    again, computed = cycle(1.2)
    assert again / computed > 0.5


def test_a_working_set_of_four_fifths_of_the_pool_is_computed_once():
    again, computed = cycle(0.8)
    assert again == 0
    assert computed == 7 * 8  # of each prompt the last token, whose logits are wanted


@pytest.mark.parametrize("share", [1.2, 0.8])
def test_the_alert_fires_for_the_one_and_not_for_the_other(share: float, tmp_path: Path):
    again, computed = (count / 7 for count in cycle(share))
    (tmp_path / "test.yml").write_text(
        f"""
rule_files: ["{REPOSITORY / "deploy/prometheus/alerts.yml"}"]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'kvstrata:kv_thrashed_tokens_total{{instance="toy"}}', values: "0+{again}x30"}}
      - {{series: 'kvstrata:prefill_tokens_total{{instance="toy"}}', values: "0+{computed}x30"}}
    promql_expr_test:
      - expr: count(ALERTS{{alertname="KVStrataThrashing",alertstate="firing"}}) or vector(0)
        eval_time: 20m
        exp_samples: [{{labels: "{{}}", value: {int(share > 1)}}}]
"""
    )
    done = subprocess.run(
        [promtool(), "test", "rules", str(tmp_path / "test.yml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
