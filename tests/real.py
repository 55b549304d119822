"""A real model, loaded once, behind as many engines as a test wants."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from kvstrata.cache.manager import KVCache
from kvstrata.config import EngineConfig, SamplingParams
from kvstrata.engine.build import block_layouts
from kvstrata.engine.engine import Engine
from kvstrata.engine.outputs import CompletionOutput, RequestOutput
from kvstrata.engine.speculation.speculator import Speculator
from kvstrata.models.decoder import Decoder
from kvstrata.models.source import load_tokenizer, open_source
from kvstrata.models.tokenizer import Tokenizer
from kvstrata.tiers.stack import TierStack
from kvstrata.tiers.tier import StoreContext, Tier

MakeTiers = Callable[[StoreContext], Sequence[Tier]]
MakeSpeculator = Callable[[Decoder, KVCache], Speculator]

CPU = torch.device("cpu")
# Where the two likeliest tokens are closer than this, products that are not batch-invariant may swap them.
NEAR_TIE = 1e-3
TOLERANCE = 1e-4


@dataclass
class RealModel:
    decoder: Decoder
    tokenizer: Tokenizer

    @classmethod
    def load(cls, path: Path, weights: str = "fp32", apart: Set[int] = frozenset()) -> RealModel:
        source = open_source(path)
        try:
            return cls(
                Decoder.load(source, weights=weights, device=CPU, apart=apart), load_tokenizer(source, path)
            )
        finally:
            source.close()

    def engine(
        self,
        *,
        blocks: int = 128,
        token_budget: int = 512,
        kv_dtype: str = "fp32",
        skip_layers: str = "",
        tiers: MakeTiers | None = None,
        speculate: MakeSpeculator | None = None,
        **cache_settings: object,
    ) -> Engine:
        """A fresh engine with an empty pool, `blocks` in each layer group, over what `tiers` makes."""
        config = EngineConfig(kv_dtype=kv_dtype, kv_dtype_skip_layers=skip_layers)  # type: ignore[arg-type]
        layouts = block_layouts(self.decoder.config, config)
        cache = KVCache(
            layouts,
            [blocks] * len(layouts),
            fingerprint=b"real".ljust(32),
            device=CPU,
            max_chunk=token_budget,
            **cache_settings,  # type: ignore[arg-type]
        )
        stack = None
        if tiers is not None:
            context = StoreContext(b"real".ljust(32), 16, tuple(layout.payload_bytes for layout in layouts))
            stack = TierStack(tiers(context), context)
        return Engine(
            self.decoder,
            self.tokenizer,
            cache,
            eos_ids=(),
            max_model_len=2048,
            max_num_seqs=32,
            token_budget=token_budget,
            device=CPU,
            seed=0,
            tiers=stack,
            load_mode="always",
            speculator=None if speculate is None else speculate(self.decoder, cache),
        )


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Step until idle, with the cache's invariants checked after every step."""
    results: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.result is not None:
                results[delta.request_id] = delta.result
        engine.cache.check_integrity()
    return results


def answer(engine: Engine, prompt: list[int], max_tokens: int = 8) -> RequestOutput:
    engine.add_request("only", prompt, greedy(max_tokens))
    return run(engine)["only"]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, ignore_eos=True)


def assert_same(expected: CompletionOutput, got: CompletionOutput) -> None:
    """Equal token ids and close log-probabilities, up to the first near-tie of the expected run."""
    assert expected.logprobs is not None
    assert got.logprobs is not None
    for place, token in enumerate(expected.token_ids):
        known = expected.logprobs[place]
        first, second = sorted((p.logprob for p in known.values()), reverse=True)[:2]
        for candidate, logprob in got.logprobs[place].items():
            if candidate in known:
                assert abs(known[candidate].logprob - logprob.logprob) < TOLERANCE
        if first - second < NEAR_TIE:
            return
        assert got.token_ids[place] == token


def bits(output: CompletionOutput) -> list[object]:
    """Everything that was computed, floats as their bytes."""
    assert output.logprobs is not None
    return [
        output.token_ids,
        [{t: struct.pack("<d", p.logprob) for t, p in listed.items()} for listed in output.logprobs],
    ]
