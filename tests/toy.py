"""A model whose next token depends, bit by bit, on every token it can see in the pool.

It stores each token's id and position in the pool's slots and reads them back through the block tables, so
that a block that is shared wrongly, evicted too early, overwritten or skipped changes the answer. It checks
every stored position, so that a stale slot raises at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvstrata.cache.formats import format_named
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache
from kvstrata.cache.retention import FULL, Retention
from kvstrata.config import LoadMode
from kvstrata.engine.engine import Engine
from kvstrata.engine.outputs import Delta, RequestOutput
from kvstrata.engine.speculation.draft_model import ModelDrafter
from kvstrata.engine.speculation.speculator import Speculator
from kvstrata.models.batch import ForwardBatch, GroupBatch
from kvstrata.models.tokenizer import Tokenizer, Vocabulary
from kvstrata.tiers.stack import TierStack
from kvstrata.tiers.tier import StoreContext, Tier

MakeSpeculator = Callable[["ToyModel", KVCache, int], Speculator]
MakeTiers = Callable[[StoreContext, "FakeClock"], Sequence[Tier]]

VOCAB = 96
EOS = 0
FINGERPRINT = b"toy".ljust(32, b".")


class CharEncoder:
    """Token n is the character of code 32 + n."""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        return [ord(c) - 32 for c in text]


def toy_tokenizer() -> Tokenizer:
    tokens = [chr(32 + i) for i in range(VOCAB)]
    vocabulary = Vocabulary(tokens, byte_level=False, special_ids=frozenset({EOS}))
    return Tokenizer(CharEncoder(), vocabulary, eos_token_ids=(EOS,))


@dataclass
class ToyModel:
    """windows: of each layer group, None for full attention. fail_on: token whose logits are NaN.

    wrong_one_in: in one of so many contexts, other logits than a toy without this has.
    """

    windows: tuple[int | None, ...]
    fail_on: int | None = None
    wrong_one_in: int = 0
    steps: int = 0
    tokens_computed: int = 0

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.steps += 1
        self.tokens_computed += len(batch.token_ids)
        for group in batch.groups:
            self._write(group, batch)
        logits = np.empty((len(batch.logit_rows), VOCAB), dtype=np.float32)
        starts = batch.query_starts.tolist()
        for out, row in enumerate(batch.logit_rows.tolist()):
            sequence = next(s for s in range(len(starts) - 1) if starts[s] <= row < starts[s + 1])
            logits[out] = self._logits(batch, sequence, int(batch.positions[row]))
            if int(batch.token_ids[row]) == self.fail_on:
                logits[out] = np.nan
        return torch.from_numpy(logits)

    def _write(self, group: GroupBatch, batch: ForwardBatch) -> None:
        size = group.kv.shape[4]
        blocks, offsets = group.slots // size, group.slots % size
        assert len(set(group.slots.tolist())) == len(group.slots), "two tokens in one slot"
        group.kv[blocks, :, 0, :, offsets, :] = batch.token_ids.float()[:, None, None, None]
        group.kv[blocks, :, 1, :, offsets, :] = batch.positions.float()[:, None, None, None]

    def _logits(self, batch: ForwardBatch, sequence: int, position: int) -> np.ndarray:
        digest = hashlib.blake2b(digest_size=8)
        for group, window in zip(batch.groups, self.windows, strict=True):
            reach, sinks = window or 0, 0
            if window is None and batch.retained is not None:
                reach = int(batch.retained.windows[sequence])
                sinks = int(batch.retained.sinks[sequence])
            first = max(0, position - reach + 1) if reach else 0
            size = group.kv.shape[4]
            table = group.block_tables[sequence]
            seen = torch.tensor([*range(min(sinks, first)), *range(first, position + 1)])
            blocks = table[seen // size].long()
            assert bool((blocks >= 0).all()), f"a visible block is missing at position {position}"
            tokens = group.kv[blocks, 0, 0, 0, seen % size, 0]
            positions = group.kv[blocks, 0, 1, 0, seen % size, 0]
            assert torch.equal(positions, seen.float()), f"stale slots seen from position {position}"
            digest.update(tokens.to(torch.int16).numpy().tobytes())
        seed = int.from_bytes(digest.digest(), "little")
        if self.wrong_one_in and seed % self.wrong_one_in == 0:
            seed += 1
        return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Toy:
    engine: Engine
    model: ToyModel
    cache: KVCache
    clock: FakeClock
    stack: TierStack | None = None

    def run(self, max_steps: int = 10_000) -> dict[str, RequestOutput]:
        """Step until idle, with the cache's invariants checked after every step; results by request id."""
        results: dict[str, RequestOutput] = {}
        for _ in range(max_steps):
            if not self.engine.has_unfinished:
                return results
            for delta in self.step():
                if delta.result is not None:
                    results[delta.request_id] = delta.result
        raise AssertionError(f"not idle after {max_steps} steps")

    def settle(self) -> None:
        """Wait until what was published is in the tiers."""
        assert self.stack is not None
        self.stack.drain(10.0)

    @property
    def caches(self) -> list[KVCache]:
        """The model's cache, and that of a draft model."""
        drafter = None if self.engine.speculator is None else self.engine.speculator.drafter
        return [self.cache, *([drafter.cache] if isinstance(drafter, ModelDrafter) else [])]

    def step(self) -> list[Delta]:
        deltas = self.engine.step()
        for cache in self.caches:
            cache.check_integrity()
        return deltas

    def tick(self, aborts: dict[str, int]) -> dict[str, RequestOutput]:
        """A second passes, and a step; what ended in it.

        aborts: ticks until a request is aborted, counted down here.
        """
        for name in [name for name, left in aborts.items() if left == 0]:
            self.engine.abort(name)
            del aborts[name]
        for name in aborts:
            aborts[name] -= 1
        self.clock.now += 1.0
        return {d.request_id: d.result for d in self.step() if d.result is not None}

    def assert_idle(self) -> None:
        """Nothing held: every block is free or cached."""
        for cache in self.caches:
            cache.check_integrity()
            for group in cache.stats().groups:
                assert group.held == 0
                assert group.free + group.cached == group.total


def make_toy(
    *,
    blocks: int | Sequence[int] = 64,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    max_model_len: int = 512,
    max_num_seqs: int = 16,
    token_budget: int = 32,
    tiers: MakeTiers | None = None,
    load_mode: LoadMode = "always",
    audit: float = 0.0,
    queue_bytes: int = 1 << 20,
    refresh_beta: float = 0.0,
    ttl_jitter: float = 0.0,
    clock: FakeClock | None = None,
    retention: Retention = FULL,
    speculate: MakeSpeculator | None = None,
    **cache_settings: object,
) -> Toy:
    """tiers: makes the tiers, nearest first, for a context and the toy's clock. clock: others' too.

    speculate: makes what proposes tokens, for the model, its cache and the token budget.
    """
    kv_format = format_named("fp32")
    layouts = [
        BlockLayout(LayerGroup((g,), 1, 2, window), kv_format, block_size) for g, window in enumerate(windows)
    ]
    clock = clock or FakeClock()
    cache = KVCache(
        layouts,
        [blocks] * len(windows) if isinstance(blocks, int) else list(blocks),
        fingerprint=FINGERPRINT,
        device=torch.device("cpu"),
        max_chunk=token_budget,
        clock=clock,
        **cache_settings,  # type: ignore[arg-type]
    )
    model = ToyModel(windows)
    stack = None
    if tiers is not None:
        context = StoreContext(
            FINGERPRINT,
            block_size,
            tuple(layout.payload_bytes for layout in layouts),
            tuple(window is None for window in windows),
        )
        stack = TierStack(tiers(context, clock), context, queue_bytes=queue_bytes, clock=clock)
    engine = Engine(
        model,
        toy_tokenizer(),
        cache,
        eos_ids=(EOS,),
        max_model_len=max_model_len,
        retention=retention,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        device=torch.device("cpu"),
        seed=0,
        clock=clock,
        tiers=stack,
        load_mode=load_mode,
        audit=audit,
        refresh_beta=refresh_beta,
        ttl_jitter=ttl_jitter,
        speculator=None if speculate is None else speculate(model, cache, token_budget),
    )
    return Toy(engine, model, cache, clock, stack)
