"""From a configuration to a running engine: find the model, load it, size the pool, name the fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvstrata import kernels
from kvstrata.cache.formats import format_named, is_higher
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache
from kvstrata.cache.retention import Retention
from kvstrata.cache.sizing import split_blocks
from kvstrata.config import EngineConfig, layers_of
from kvstrata.engine.engine import Engine, StepReport
from kvstrata.engine.fingerprint import fingerprint
from kvstrata.engine.limits import check_reach
from kvstrata.engine.speculation.build import DraftPool, load_draft, make_speculator
from kvstrata.engine.speculation.draft_model import widest_step
from kvstrata.errors import ConfigError
from kvstrata.models.chat import ChatTemplate
from kvstrata.models.config import DecoderConfig
from kvstrata.models.decoder import Decoder
from kvstrata.models.digest import weights_digest
from kvstrata.models.key_offset import measure_key_offsets
from kvstrata.models.locate import locate
from kvstrata.models.source import load_tokenizer, open_source
from kvstrata.models.tokenizer import Tokenizer
from kvstrata.models.weight_modes import PACKED, resolve
from kvstrata.models.weights import WeightSource
from kvstrata.tiers.memory import available_bytes, total_bytes
from kvstrata.tiers.open import check_tier_url, open_tier
from kvstrata.tiers.stack import TierStack
from kvstrata.tiers.tier import StoreContext, Tier

# Of what is free once the weights are in: the rest is for activations, the page cache and other programs.
_POOL_SHARE = 0.4


@dataclass(frozen=True)
class Loaded:
    """An engine ready to serve, and what was loaded for it."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    decoder_config: DecoderConfig
    path: Path
    weights_bytes: int
    pool_bytes: int
    pool_tokens: int


def build(
    config: EngineConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> Loaded:
    """Load the model that a configuration names and set up its engine.

    progress: called with tensors loaded so far and their total. Raises ModelError and ConfigError.
    """
    for url in config.tiers:
        check_tier_url(url)  # before the model is loaded
    retention = Retention.parse(config.retention)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = _device(config.device)
    path = locate(config.model)
    source = open_source(path)
    try:
        tokenizer, decoder, digest = _load(path, source, config, device, progress)
    finally:
        source.close()
    draft = load_draft(config, tokenizer, device)
    kernels.keep_freed_memory()  # not before: what packing weights freed is of no use to steps
    weight_mode = resolve(config.weights, device)
    layouts = block_layouts(source.config, config)
    draft_layouts = (
        () if draft is None else block_layouts(draft.config, replace(config, kv_dtype_skip_layers=()))
    )
    pool_bytes, max_model_len = _pool_size(config, (*layouts, *draft_layouts), source.config, device)

    def split(part: tuple[BlockLayout, ...], max_chunk: int) -> list[int]:
        """Blocks for each layout; two models share the memory so that both hold about as many tokens."""
        whole = sum(layout.stride_bytes for layout in (*layouts, *draft_layouts))
        return split_blocks(
            pool_bytes * sum(layout.stride_bytes for layout in part) // whole,
            part,
            max_num_seqs=config.max_num_seqs,
            max_chunk=max_chunk,
            max_model_len=max_model_len,
        )

    widest = widest_step(config.max_num_batched_tokens, config.draft_tokens)
    num_blocks = split(layouts, config.max_num_batched_tokens)
    draft_blocks = [] if draft is None else split(draft_layouts, widest)
    offsets = measure_key_offsets(decoder, tokenizer.encode, _centred(layouts))
    decoder.offset_keys(offsets)
    if draft is not None:
        draft.decoder.offset_keys(
            measure_key_offsets(draft.decoder, tokenizer.encode, _centred(draft_layouts))
        )
    apart = layers_apart(source.config, config)
    name = fingerprint(
        weights_digest=digest,
        config=source.config,
        kv_dtype=config.kv_dtype,
        key_offsets=offsets,
        skipped={config.kv_dtype_skipped: sorted(apart)} if apart else {},
        block_size=config.block_size,
        weight_mode=weight_mode,
        arithmetic_version=kernels.arithmetic_version(),
    )
    _check_tiers(config, device, weight_mode)
    check_reach(retention, source.config.max_position)
    cache = KVCache(
        layouts,
        num_blocks,
        fingerprint=name,
        device=device,
        max_chunk=config.max_num_batched_tokens,
        policy=config.policy,
        ttl=config.ttl,
        prefix_caching=config.prefix_caching,
    )
    speculator = make_speculator(
        config,
        decoder,
        cache,
        device,
        None if draft is None else (draft, DraftPool(draft_layouts, draft_blocks)),
    )
    stack = _open_tiers(config, layouts, name)
    engine = Engine(
        decoder,
        tokenizer,
        cache,
        eos_ids=tuple({*source.config.eos_token_ids, *tokenizer.eos_token_ids}),
        max_model_len=min(max_model_len, source.config.max_position),
        max_stream_len=config.max_model_len,
        max_reach=source.config.max_position,
        retention=retention,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        device=device,
        vocab_size=source.config.vocab_size,
        seed=config.seed,
        on_step=on_step,
        tiers=stack,
        load_mode=config.load_mode,
        audit=config.audit,
        refresh_beta=config.refresh_beta,
        ttl_jitter=config.ttl_jitter,
        speculator=speculator,
    )
    if engine.tiering is not None:
        engine.tiering.calibrate()
    engine.pages.prepare(torch.get_num_threads())
    pools = zip((*layouts, *draft_layouts), (*num_blocks, *draft_blocks), strict=True)
    used = sum(layout.stride_bytes * blocks for layout, blocks in pools)
    template = config.chat_template or tokenizer.chat_template
    return Loaded(
        engine=engine,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token),
        decoder_config=source.config,
        path=path,
        weights_bytes=decoder.weights_nbytes() + (0 if draft is None else draft.decoder.weights_nbytes()),
        pool_bytes=used,
        pool_tokens=max(num_blocks) * config.block_size,
    )


def block_layouts(model: DecoderConfig, config: EngineConfig) -> tuple[BlockLayout, ...]:
    """One layout for each of the model's layer groups, whose layers have one format.

    Raises ConfigError for layers that the model does not have.
    """
    apart = layers_apart(model, config)
    return tuple(
        BlockLayout(
            LayerGroup(layers, model.num_kv_heads, model.head_dim, window),
            format_named(config.kv_dtype_skipped if layers[0] in apart else config.kv_dtype),
            config.block_size,
        )
        for window, layers in model.layer_groups(apart)
    )


def layers_apart(model: DecoderConfig, config: EngineConfig) -> frozenset[int]:
    """The layers whose format is not `kv_dtype`. Raises ConfigError for layers that the model lacks."""
    layers = layers_of(config.kv_dtype_skip_layers, model.num_layers)  # type: ignore[arg-type]
    return layers if is_higher(config.kv_dtype_skipped, config.kv_dtype) else frozenset()


def _centred(layouts: Sequence[BlockLayout]) -> list[int]:
    """The layers whose format is better off without what all keys have in common."""
    return [layer for layout in layouts if layout.format.centred for layer in layout.group.layers]


def _check_tiers(config: EngineConfig, device: torch.device, weight_mode: str) -> None:
    if config.tiers and device.type != "cpu":
        raise ConfigError(f"tiers is {list(config.tiers)!r}; with device {device.type} there are none yet")
    exact = weight_mode in PACKED and kernels.backend() != "reference"
    if config.audit and not exact:
        raise ConfigError(
            f"audit is {config.audit:g}, which compares bit for bit; that needs packed weights and native "
            f"kernels, and this is weights {weight_mode!r} on {kernels.backend()}"
        )


def _open_tiers(
    config: EngineConfig, layouts: tuple[BlockLayout, ...], fingerprint: bytes
) -> TierStack | None:
    if not config.tiers:
        return None
    payloads = tuple(layout.payload_bytes for layout in layouts)
    chained = tuple(layout.group.window is None for layout in layouts)
    context = StoreContext(fingerprint, config.block_size, payloads, chained)
    tiers: list[Tier] = []
    try:
        for url in config.tiers:
            tiers.append(open_tier(url, context))
        return TierStack(tiers, context)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise


def _load(
    path: Path,
    source: WeightSource,
    config: EngineConfig,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> tuple[Tokenizer, Decoder, bytes]:
    apart = layers_apart(source.config, config)
    # Hashing and building the tokenizer run beside the weights' dequantisation.
    with ThreadPoolExecutor(2) as pool:
        tokenizer = pool.submit(load_tokenizer, source, path)
        digest = pool.submit(weights_digest, source)
        decoder = Decoder.load(source, weights=config.weights, device=device, apart=apart, progress=progress)
        return tokenizer.result(), decoder, digest.result()


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _pool_size(
    config: EngineConfig, layouts: tuple[BlockLayout, ...], model: DecoderConfig, device: torch.device
) -> tuple[int, int]:
    """Bytes of the pool, and the most tokens of a sequence by model and configuration."""
    full = Retention.parse(config.retention).is_full
    if full and config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model was made for {model.max_position} tokens: "
            "a retention such as sinks:4+1020 has no such limit"
        )
    max_model_len = config.max_model_len or model.max_position
    if isinstance(config.kv_memory, int):
        total = total_bytes(device)
        if config.kv_memory > total:
            raise ConfigError(
                f"kv_memory is {config.kv_memory}; the {device.type} has {total} bytes: give less"
            )
        return config.kv_memory, max_model_len
    blocks = -(-max_model_len // config.block_size) * config.max_num_seqs
    most_useful = sum(layout.stride_bytes for layout in layouts) * blocks
    return auto_pool_bytes(available_bytes(device), most_useful), max_model_len


def auto_pool_bytes(available: int, most_useful: int) -> int:
    """Pool size where the user gave none: a share of what is free, and never more than requests can use."""
    return min(int(available * _POOL_SHARE), most_useful)
