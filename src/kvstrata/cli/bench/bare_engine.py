"""An engine without a model file, for measurements of scheduler and cache alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvstrata.cache.formats import format_named
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache
from kvstrata.engine.engine import Engine, StepReport
from kvstrata.engine.runner import Model
from kvstrata.models.tokenizer import Tokenizer, Vocabulary

_STEP_TOKENS = 512
_SMALLEST = LayerGroup((0,), 1, 1)


class _Numbers:
    """Encodes nothing: prompts of these measurements are token ids."""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Token ids of a text of numbers."""
        return [int(word) for word in text.split()]


def bare_engine(
    model: Model,
    *,
    vocab_size: int,
    group: LayerGroup = _SMALLEST,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    on_step: Callable[[StepReport], None] | None = None,
) -> Engine:
    """An engine over one layer group, by default of one layer as small as can be; prefix caching off."""
    return engine_over(
        [BlockLayout(group, format_named("fp16"), block_size)],
        [num_blocks],
        model,
        vocab_size=vocab_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        on_step=on_step,
    )


def engine_over(
    layouts: Sequence[BlockLayout],
    num_blocks: Sequence[int],
    model: Model,
    *,
    vocab_size: int,
    max_num_seqs: int,
    max_model_len: int,
    on_step: Callable[[StepReport], None] | None = None,
) -> Engine:
    """An engine over such layer groups, with so many blocks each; prefix caching off."""
    device = torch.device("cpu")
    cache = KVCache(
        layouts,
        num_blocks,
        fingerprint=b"bare",
        device=device,
        max_chunk=_STEP_TOKENS,
        prefix_caching=False,
    )
    tokenizer = Tokenizer(_Numbers(), Vocabulary([str(i) for i in range(vocab_size)], byte_level=False))
    return Engine(
        model,
        tokenizer,
        cache,
        eos_ids=(),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        token_budget=_STEP_TOKENS,
        device=device,
        seed=0,
        on_step=on_step,
    )
