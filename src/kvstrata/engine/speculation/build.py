"""From the settings to a speculator: find who proposes, load it, measure what steps take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvstrata import kernels
from kvstrata.cache.layout import BlockLayout
from kvstrata.cache.manager import KVCache
from kvstrata.config import EngineConfig
from kvstrata.engine.fingerprint import fingerprint
from kvstrata.engine.runner import Runner
from kvstrata.engine.speculation.calibrate import measure
from kvstrata.engine.speculation.costs import StepCosts
from kvstrata.engine.speculation.draft_model import ModelDrafter, widest_step
from kvstrata.engine.speculation.drafter import Drafter
from kvstrata.engine.speculation.layers import LayersDrafter
from kvstrata.engine.speculation.ngram import NgramDrafter
from kvstrata.engine.speculation.speculator import Speculator
from kvstrata.errors import ConfigError
from kvstrata.models.config import DecoderConfig
from kvstrata.models.decoder import Decoder
from kvstrata.models.digest import weights_digest
from kvstrata.models.locate import locate
from kvstrata.models.source import load_tokenizer, open_source
from kvstrata.models.tokenizer import Tokenizer
from kvstrata.models.weight_modes import resolve

_WEIGHTS = "auto"  # a draft keeps its file's bits, however the target holds its own


@dataclass(frozen=True)
class DraftModel:
    """A draft model in memory, and what names its cache's content."""

    decoder: Decoder
    config: DecoderConfig
    fingerprint: bytes


@dataclass(frozen=True)
class DraftPool:
    """The draft model's own pool: a layout and a number of blocks for each of its layer groups."""

    layouts: tuple[BlockLayout, ...]
    blocks: list[int]


def load_draft(settings: EngineConfig, target: Tokenizer, device: torch.device) -> DraftModel | None:
    """The model of `draft_model`, None where there is none. Raises ModelError, ConfigError."""
    if settings.draft_model is None:
        return None
    path = locate(settings.draft_model)
    source = open_source(path)
    try:
        _check_vocabulary(load_tokenizer(source, path), target, path)
        decoder = Decoder.load(source, weights=_WEIGHTS, device=device)
        digest = weights_digest(source)
    finally:
        source.close()
    name = fingerprint(
        weights_digest=digest,
        config=source.config,
        kv_dtype=settings.kv_dtype,
        key_offsets={},  # its blocks stay in this process
        skipped={},
        block_size=settings.block_size,
        weight_mode=resolve(_WEIGHTS, device),
        arithmetic_version=kernels.arithmetic_version(),
    )
    return DraftModel(decoder, source.config, name)


def _check_vocabulary(draft: Tokenizer, target: Tokenizer, path: Path) -> None:
    sizes = f"its vocabulary has {draft.vocab_size} tokens, the model's {target.vocab_size}"
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(f"draft_model is {path}: {sizes}; give a model of the same vocabulary")
    for token in range(target.vocab_size):
        if draft.token_bytes(token) != target.token_bytes(token):
            raise ConfigError(
                f"draft_model is {path}: {sizes}, but token {token} is not the same; "
                "give a model of the same vocabulary"
            )


def make_speculator(
    settings: EngineConfig,
    target: Decoder,
    cache: KVCache,
    device: torch.device,
    draft: tuple[DraftModel, DraftPool] | None,
) -> Speculator | None:
    """What proposes tokens for a model over its cache, None where nothing is to."""
    if settings.draft is None and draft is None:
        return None
    rows = 1 + settings.draft_tokens
    layers = settings.draft_layers
    first = None if layers is None else target.first_layers(layers)
    costs = measure(Runner(target, cache, device), cache, rows)
    drafter: Drafter
    if draft is not None:
        drafter = _model_drafter(settings, target, costs, device, *draft)
    elif first is not None:
        runner = Runner(first, cache, device)
        drafter = LayersDrafter(runner, measure(runner, cache, rows), target.config.vocab_size)
    else:
        drafter = NgramDrafter()
    return Speculator(drafter, costs, most=settings.draft_tokens, adaptive=settings.draft_adaptive)


def _model_drafter(  # noqa: PLR0917 (a call of one place)
    settings: EngineConfig,
    target: Decoder,
    costs: StepCosts,
    device: torch.device,
    draft: DraftModel,
    pool: DraftPool,
) -> ModelDrafter:
    cache = KVCache(
        pool.layouts,
        pool.blocks,
        fingerprint=draft.fingerprint,
        device=device,
        max_chunk=widest_step(settings.max_num_batched_tokens, settings.draft_tokens),
        policy=settings.policy,
        ttl=settings.ttl,
        prefix_caching=settings.prefix_caching,
    )
    runner = Runner(draft.decoder, cache, device)
    return ModelDrafter(
        runner,
        cache,
        measure(runner, cache, 1 + settings.draft_tokens),
        costs,
        vocab_size=min(draft.config.vocab_size, target.config.vocab_size),
        max_len=draft.config.max_position,
        chunk=settings.max_num_batched_tokens,
        adaptive=settings.draft_adaptive,
    )
