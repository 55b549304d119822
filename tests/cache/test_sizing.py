"""Bytes of a cache, of its blocks, and how one memory is shared between layer groups."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_configs import CONFIGS

from kvstrata.cache.formats import FORMATS, format_named
from kvstrata.cache.formula import sequence_formula
from kvstrata.cache.layout import ALIGNMENT, BlockLayout, LayerGroup
from kvstrata.cache.shapes import cache_shape
from kvstrata.cache.sizing import CacheSize, cache_size, split_blocks, window_blocks
from kvstrata.errors import ConfigError


def size_of(name: str, fmt: str = "bf16", **settings: Any) -> CacheSize:
    return cache_size(cache_shape(CONFIGS[name]), format_named(fmt), **settings)


def test_llama_2_7b_takes_32_gib_for_32_sequences_of_2048_tokens_in_fp16() -> None:
    size = size_of("llama-2-7b", "fp16", length=2048, batch=32)
    assert size.total_bytes == 34_359_738_368 == 2 * 32 * 32 * 128 * 2 * 2048 * 32
    assert size.allocated_bytes == size.total_bytes
    assert sequence_formula(size) == (
        "2 (K and V) x 32 layers x 32 KV heads x 128 x 2 bytes x 2,048 tokens x 32 sequences "
        "= 34,359,738,368 bytes"
    )


@pytest.mark.parametrize(
    ("fmt", "bytes_a_vector"),
    [
        ("fp32", 512),
        ("fp16", 256),
        ("bf16", 256),
        ("fp8_e4m3", 128 + 2),
        ("int8", 128 + 2),
        ("int4", 64 + 8 * 2),
    ],
)
def test_a_format_counts_its_scales(fmt: str, bytes_a_vector: int) -> None:
    assert size_of("llama-3.1-8b", fmt, length=1).bytes_per_token == 2 * 32 * 8 * bytes_a_vector


def test_a_head_size_that_scales_do_not_divide_gets_one_more_scale() -> None:
    fmt = format_named("int4")
    assert fmt.vector_bytes(80) + fmt.vector_scale_bytes(80) == 40 + 5 * 2


def test_layers_in_another_format_count_with_its_bytes() -> None:
    bf16 = format_named("bf16")
    size = size_of("llama-3.1-8b", "int4", length=100, others={0: bf16, 31: bf16})
    assert size.bytes_per_token == 2 * 8 * (30 * (64 + 8 * 2) + 2 * 256)
    assert [(kind.num_layers, kind.format.name) for kind in size.kinds] == [(2, "bf16"), (30, "int4")]
    assert "2 layers x 8 KV heads x 128 x 2 bytes" in sequence_formula(size)


def test_a_window_stops_growing_when_it_is_full() -> None:
    at = {length: size_of("mistral-7b-v0.1", length=length) for length in (4095, 4096, 4097, 30_000)}
    assert at[4095].bytes_per_sequence == 4095 * 131_072
    assert at[4096].bytes_per_sequence == at[4097].bytes_per_sequence == at[30_000].bytes_per_sequence
    assert at[30_000].bytes_per_token_past_windows == 0


def test_a_hybrid_stack_grows_by_its_full_layers_only() -> None:
    size = size_of("gemma-3-4b", length=100_000)
    full, window = 5 * 2 * 4 * 256 * 2, 29 * 2 * 4 * 256 * 2
    assert size.bytes_per_sequence == full * 100_000 + window * 1024
    assert size.bytes_per_token_past_windows == full


@pytest.mark.parametrize(
    ("name", "length", "factor"),
    [
        ("llama-2-7b", 2048, 1.0),
        ("llama-3.1-8b", 2048, 4.0),
        ("falcon-7b", 2048, 71.0),
        ("qwen2.5-7b", 2048, 7.0),
        ("mistral-7b-v0.1", 4096, 4.0),
        ("mistral-7b-v0.1", 32_768, 32.0),  # 4 by the heads, 8 by the window
        ("deepseek-v2-lite", 100, 16 * (192 + 128) / 576),
    ],
)
def test_the_factor_against_mha_counts_heads_and_windows(name: str, length: int, factor: float) -> None:
    assert size_of(name, length=length).mha_factor == pytest.approx(factor)


def test_blocks_round_a_sequence_up_and_strides_are_aligned() -> None:
    size = size_of("gpt2", length=17, block_size=16)
    assert size.bytes_per_sequence == 17 * 36_864
    assert size.allocated_bytes_per_sequence == 2 * 16 * 36_864
    odd = size_of("qwen3-0.6b", "int8", length=1, block_size=1)
    assert odd.bytes_per_token == 2 * 28 * 8 * 130
    assert odd.allocated_bytes_per_sequence == -(-2 * 28 * 8 * 130 // ALIGNMENT) * ALIGNMENT


@given(window=st.integers(1, 200), length=st.integers(1, 300), block_size=st.integers(1, 40))
def test_window_blocks_are_the_most_a_growing_sequence_touches(
    window: int, length: int, block_size: int
) -> None:
    most = max(-(-n // block_size) - max(0, n - window) // block_size for n in range(1, length + 1))
    bound = window_blocks(window, length, block_size)
    assert most <= bound
    if length >= window + block_size:  # by then every alignment has come up
        assert most == bound


def test_sequences_that_fit_are_whole_and_counted_in_blocks() -> None:
    size = size_of("llama-2-7b", "fp16", length=2048)
    assert size.sequences_that_fit(16 * 2**30) == 16
    assert size.sequences_that_fit(16 * 2**30 - 1) == 15
    assert size.sequences_that_fit(-5) == 0
    assert size_of("llama-2-7b", "fp16", length=2049).sequences_that_fit(16 * 2**30) == 15


@pytest.mark.parametrize("field", ["length", "batch", "block_size"])
def test_a_size_below_one_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 0"):
        size_of("gpt2", **{"length": 1, field: 0})


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_pools_block_layout_agrees_with_the_sizing(fmt: str) -> None:
    group = LayerGroup(tuple(range(32)), num_kv_heads=8, head_dim=128)
    layout = BlockLayout(group, format_named(fmt), 16)
    size = size_of("llama-3.1-8b", fmt, length=16)
    assert size.bytes_per_sequence == layout.payload_bytes
    assert size.allocated_bytes_per_sequence == layout.stride_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-v2-lite", "27 layers x 576 x 2 bytes x 8 tokens x 1 sequence = 248,832 bytes"),
        (
            "deepseek-v3.2",
            "61 layers x (576 x 2 bytes + 128 x 2 bytes) x 8 tokens x 1 sequence = 687,104 bytes",
        ),
        (
            "gpt-oss-20b",
            "(2 (K and V) x 12 layers x 8 KV heads x 64 x 2 bytes x min(8, 128) tokens + "
            "2 (K and V) x 12 layers x 8 KV heads x 64 x 2 bytes x 8 tokens) x 1 sequence = 393,216 bytes",
        ),
    ],
)
def test_the_formula_names_what_each_kind_of_layer_keeps(name: str, expected: str) -> None:
    assert sequence_formula(size_of(name, length=8)) == expected


def layout(window: int | None, layers: int = 2, block_size: int = 16) -> BlockLayout:
    return BlockLayout(LayerGroup(tuple(range(layers)), 1, 64, window), format_named("bf16"), block_size)


def split(memory: int, layouts: list[BlockLayout], **settings: int) -> list[int]:
    limits = {"max_num_seqs": 4, "max_chunk": 64, "max_model_len": 8192, **settings}
    return split_blocks(memory, layouts, **limits)


def test_one_full_group_gets_all_the_memory() -> None:
    full = layout(None)
    assert split(100 * full.stride_bytes + 1, [full]) == [100]


def test_a_window_group_gets_what_its_sequences_touch_and_the_rest_goes_to_the_full_group() -> None:
    full, window = layout(None), layout(100)
    most = 4 * (-(-(99 + 64) // 16) + 1)
    memory = 1000 * full.stride_bytes
    assert split(memory, [full, window]) == [1000 - most, most]
    assert split(memory, [window, full]) == [most, 1000 - most]


def test_a_small_memory_is_shared_equally() -> None:
    full, window = layout(None), layout(512)
    assert split(10 * (full.stride_bytes + window.stride_bytes), [full, window]) == [10, 10]


def test_a_window_longer_than_any_sequence_needs_no_more_than_the_sequences() -> None:
    blocks = split(10_000 * 8192, [layout(None), layout(4096)], max_model_len=160)
    assert blocks[1] == 4 * 10


def test_without_a_full_group_the_widest_window_takes_what_is_left() -> None:
    narrow, wide = layout(32), layout(64)
    blocks = split(1000 * narrow.stride_bytes, [narrow, wide])
    assert blocks == [4 * (-(-(31 + 64) // 16) + 1), 1000 - 4 * (-(-(31 + 64) // 16) + 1)]


def test_less_than_a_block_for_each_group_is_refused_with_the_least_that_would_do() -> None:
    full, window = layout(None), layout(64)
    least = full.stride_bytes + window.stride_bytes
    assert split(least, [full, window]) == [1, 1]
    with pytest.raises(ConfigError, match=f"kv_memory is {least - 1} bytes; .* takes {least}"):
        split(least - 1, [full, window])


@given(
    memory=st.integers(0, 2**26),
    groups=st.lists(
        st.tuples(st.one_of(st.none(), st.integers(1, 600)), st.integers(1, 30)), min_size=1, max_size=4
    ),
    seqs=st.integers(1, 16),
    chunk=st.integers(1, 512),
)
def test_a_split_fits_and_one_block_more_would_not(
    memory: int, groups: list[tuple[int | None, int]], seqs: int, chunk: int
) -> None:
    layouts = [layout(window, layers) for window, layers in groups]
    used = sum(lay.stride_bytes for lay in layouts)
    if memory < used:
        with pytest.raises(ConfigError):
            split(memory, layouts, max_num_seqs=seqs, max_chunk=chunk)
        return
    blocks = split(memory, layouts, max_num_seqs=seqs, max_chunk=chunk)
    assert min(blocks) >= 1
    assert sum(n * lay.stride_bytes for n, lay in zip(blocks, layouts, strict=True)) <= memory
    most = max(blocks)
    grown = [
        n + 1 if n == most else n for n in blocks
    ]  # groups at their cap may be as large as the others by chance
    assert sum(n * lay.stride_bytes for n, lay in zip(grown, layouts, strict=True)) > memory or any(
        lay.group.window for n, lay in zip(blocks, layouts, strict=True) if n == most
    )
