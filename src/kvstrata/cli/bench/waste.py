"""`kvstrata bench waste`: how much of the pool is allocated to sequences and holds no token.

Waste is a matter of block tables alone: the real scheduler and cache run over a model that computes nothing.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.config import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from kvstrata.models.batch import ForwardBatch

_VOCAB = 64
_POOL_FOR = 1.1  # the pool holds the longest prompts of all sequences, and a tenth more


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("waste")(waste)


class _NoModel:
    """Logits of zero."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        import torch  # noqa: PLC0415  (torch is slow to import)

        return torch.zeros((len(batch.logit_rows), _VOCAB))


def waste(
    *,
    sequences: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 64,
    shortest: Annotated[int, typer.Option(min=1, help="Tokens of the shortest request.")] = 100,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of the longest request.")] = 2000,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = 16,
    json: JsonFlag = False,
) -> None:
    """Measure the pool's waste at 64 requests of 100 to 2,000 tokens at once."""
    if shortest > longest:
        raise typer.BadParameter(f"--shortest is {shortest}, more than --longest, {longest}")
    figures = measure(sequences, shortest, longest, block_size)
    if json:
        emit_json(figures)
        return
    stdout_console().print(
        f"{figures['concurrency']} sequences at once, {figures['steps']} steps, blocks of {block_size}: "
        f"waste {figures['waste_mean']:.2%} of the pool on average, {figures['waste_max']:.2%} at most"
    )


def measure(sequences: int, shortest: int, longest: int, block_size: int) -> dict[str, Any]:
    """Serve `3 * sequences` requests of lengths drawn evenly; waste over the steps in which `sequences` run."""
    from kvstrata.cli.bench.bare_engine import bare_engine  # noqa: PLC0415  (torch is slow to import)

    rng = random.Random(0)
    blocks = int(sequences * -(-longest // block_size) * _POOL_FOR)
    reports: list[int] = []
    engine = bare_engine(
        _NoModel(),
        vocab_size=_VOCAB,
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=sequences,
        max_model_len=longest + 1,
        on_step=lambda report: reports.append(report.running),
    )
    for number in range(3 * sequences):
        total = rng.randint(shortest, longest)
        prompt = rng.randint(1, max(1, total - 1))
        params = SamplingParams(temperature=0.0, max_tokens=max(1, total - prompt), ignore_eos=True)
        engine.add_request(str(number), [rng.randrange(_VOCAB) for _ in range(prompt)], params)
    shares: list[float] = []
    while engine.has_unfinished:
        engine.step()
        if reports[-1] == sequences:
            shares.append(engine.cache.stats().waste)
    return {
        "waste_mean": sum(shares) / len(shares),
        "waste_max": max(shares),
        "concurrency": sequences,
        "steps": len(shares),
        "requests": 3 * sequences,
        "pool_tokens": blocks * block_size,
    }
