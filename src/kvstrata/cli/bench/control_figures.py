"""What `kvstrata bench control` measures: bookkeeping alone, without a model or with next to none."""

from __future__ import annotations

import random
import time
from typing import Final

import torch
from torch import Tensor

from kvstrata import kernels
from kvstrata.cache.formats import format_named
from kvstrata.cache.keys import Extras
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache
from kvstrata.cli.bench.bare_engine import bare_engine
from kvstrata.cli.bench.random_model import random_decoder
from kvstrata.config import SamplingParams
from kvstrata.engine.engine import StepReport
from kvstrata.engine.runner import Model
from kvstrata.models.batch import ForwardBatch
from kvstrata.models.config import DecoderConfig, LayerConfig, RopeConfig

_BLOCK: Final = 16
_IDS: Final = 49_152
_PARTS: Final = ("keys", "match", "open", "grow", "commit", "release")
_PROMPT: Final = 1  # a longer one would be attention's work
_HEAD: Final = 32


def cached_prompt(tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds of each part for a prompt of so many tokens, all but its last block cached; the best."""
    layout = BlockLayout(LayerGroup((0,), 1, 16), format_named("bf16"), _BLOCK)
    blocks = 2 * -(-tokens // _BLOCK)
    cache = KVCache([layout], [blocks], fingerprint=b"m" * 32, device="cpu", max_chunk=tokens)
    prompt = random.Random(0).choices(range(_IDS), k=tokens)
    _serve(cache, prompt)  # fills the cache
    runs = [_serve(cache, prompt) for _ in range(repeats)]
    return {part: min(run[part] for run in runs) for part in _PARTS}


def _serve(cache: KVCache, prompt: list[int]) -> dict[str, float]:
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    chain = cache.chain(prompt, Extras())
    mark()
    hit = cache.match(chain, len(prompt) - 1)
    mark()
    sequence = cache.open(chain, hit, len(prompt))
    mark()
    if sequence is None or not cache.grow(sequence, len(prompt)):
        raise RuntimeError("the pool is too small for the prompt")
    mark()
    cache.commit(sequence, len(prompt))
    mark()
    cache.release(sequence)
    mark()
    return {part: 1e3 * (marks[i + 1] - marks[i]) for i, part in enumerate(_PARTS)}


class _TimedModel:
    """Sums up the seconds that a model's forward passes take."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.seconds = 0.0

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute one step."""
        began = time.perf_counter()
        logits = self._model.forward(batch)
        self.seconds += time.perf_counter() - began
        return logits


def decode_step(layers: int, sequences: int, steps: int) -> dict[str, float]:
    """Milliseconds of a decode step of so many sequences on a deep and very thin model; the quickest counts.

    ms: the whole step, in which arithmetic is next to nothing: what is left is scheduling, the batch, the
    calls of the operators, sampling and delivery. outside_forward_ms: all of that but the forward pass.
    """
    rope = LayerConfig(None, RopeConfig(10_000.0))
    config = DecoderConfig("llama", 64, _HEAD, _HEAD, 1, 1, _HEAD, (rope,) * layers, 1e-5, 4096)
    weights = "auto" if kernels.backend() != "reference" else "fp32"
    model = _TimedModel(random_decoder(config, weights))
    spent: list[tuple[float, float]] = []

    def on_step(report: StepReport) -> None:
        if report.decode_tokens == sequences and not report.prefill_tokens:
            spent.append((report.seconds, report.seconds - model.seconds))
        model.seconds = 0.0

    engine = bare_engine(
        model,
        vocab_size=config.vocab_size,
        group=LayerGroup(tuple(range(layers)), 1, _HEAD),
        num_blocks=sequences * -(-(_PROMPT + steps + 1) // _BLOCK),
        block_size=_BLOCK,
        max_num_seqs=sequences,
        max_model_len=_PROMPT + steps + 1,
        on_step=on_step,
    )
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    for number in range(sequences):
        prompt = [rng.randrange(config.vocab_size) for _ in range(_PROMPT)]
        engine.add_request(str(number), prompt, params)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # there is nothing to share out
    try:
        while engine.has_unfinished:
            engine.step()
    finally:
        torch.set_num_threads(threads)
    whole, outside = (1e3 * min(times) for times in zip(*spent, strict=True))
    return {"ms": whole, "outside_forward_ms": outside}
