"""Loading a decoder and running batches: what it refuses, and what must not depend on the batch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import tiny_models as tiny
import torch
from paged import PagedRun

from kvstrata.errors import ConfigError, ModelError
from kvstrata.models.batch import ForwardBatch, GroupBatch
from kvstrata.models.config import DecoderConfig, LayerConfig, RopeConfig
from kvstrata.models.decoder import Decoder, placements
from kvstrata.models.weights import RawTensor

CPU = torch.device("cpu")
ROPE = RopeConfig(10_000.0)
CONFIG = DecoderConfig(
    architecture="llama",
    vocab_size=tiny.VOCAB,
    hidden_size=tiny.HIDDEN,
    intermediate_size=tiny.INNER,
    num_heads=tiny.HEADS,
    num_kv_heads=tiny.KV_HEADS,
    head_dim=tiny.HEAD_DIM,
    layers=(LayerConfig(None, ROPE),) * tiny.LAYERS,
    norm_eps=1e-6,
    max_position=128,
    tied_embeddings=True,
)


class MemorySource:
    """Weights that are in memory already."""

    def __init__(self, config: DecoderConfig = CONFIG) -> None:
        self.config = config
        self.weights: dict[str, np.ndarray] = tiny.weights()

    def names(self) -> Iterable[str]:
        return self.weights

    def tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.weights[name])

    def raw(self, name: str) -> RawTensor:
        values = self.weights[name]
        rows = np.atleast_2d(values).view(np.uint8)
        return RawTensor("F32", values.shape, rows)

    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.weights.values())

    def close(self) -> None:
        self.weights = {}


def test_layers_are_placed_in_their_groups_in_order() -> None:
    windows = [512, 512, None, 512, None]
    config = replace(CONFIG, layers=tuple(LayerConfig(window, ROPE) for window in windows))
    assert [(place.group, place.index) for place in placements(config)] == [
        (1, 0),
        (1, 1),
        (0, 0),
        (1, 2),
        (0, 1),
    ]


def test_weights_lie_in_memory_once() -> None:
    source = MemorySource()
    assert Decoder.load(source, weights="fp32", device=CPU).weights_nbytes() == source.nbytes()


def test_bf16_weights_take_half_and_give_nearly_the_same() -> None:
    source = MemorySource()
    exact = Decoder.load(source, weights="fp32", device=CPU)
    half = Decoder.load(source, weights="bf16", device=CPU)
    assert half.weights_nbytes() < 0.52 * exact.weights_nbytes()
    ids = list(range(30))
    a, b = (PagedRun(decoder, [30]).step([ids])[0] for decoder in (exact, half))
    assert b.dtype == torch.float32
    assert (a.exp() - b.exp()).abs().sum(-1).mean() < 0.2


def test_progress_counts_every_tensor_once() -> None:
    source, seen = MemorySource(), []
    Decoder.load(source, weights="fp32", device=CPU, progress=lambda done, total: seen.append((done, total)))
    count = len(source.weights)
    assert seen == [(done, count) for done in range(1, count + 1)]


def test_an_unknown_weight_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="weights is 'int7'; choose one of auto, int8, int4, fp32, bf16"):
        Decoder.load(MemorySource(), weights="int7", device=CPU)


def test_a_missing_tensor_is_named() -> None:
    source = MemorySource()
    del source.weights["layers.1.up.weight"]
    with pytest.raises(ModelError, match=r"tensor layers\.1\.up\.weight is missing"):
        Decoder.load(source, weights="fp32", device=CPU)


@pytest.mark.parametrize("name", ["layers.0.k.weight", "final_norm.weight"])
def test_a_tensor_of_another_shape_is_named(name: str) -> None:
    source = MemorySource()
    shape = list(source.weights[name].shape)
    source.weights[name] = source.weights[name][:-1]
    wanted = f"tensor {name} has shape [{shape[0] - 1}"
    with pytest.raises(ModelError, match=re.escape(wanted)):
        Decoder.load(source, weights="fp32", device=CPU)


def test_only_the_rows_asked_for_get_logits() -> None:
    decoder = Decoder.load(MemorySource(), device=CPU)
    ids = torch.arange(20)

    def logits(rows: list[int]) -> torch.Tensor:
        group = GroupBatch(
            torch.zeros(2, tiny.LAYERS, 2, 2, 16, 8), torch.tensor([[1, 0]]).int(), 16 * (ids < 16) + ids % 16
        )
        starts, lens = torch.tensor([0, 20]).int(), torch.tensor([20]).int()
        return decoder.forward(ForwardBatch(ids, ids, starts, lens, torch.tensor(rows).long(), (group,)))

    everything = logits(list(range(20)))
    torch.testing.assert_close(logits([19, 3]), everything[[19, 3]])
    assert logits([]).shape == (0, tiny.VOCAB)


def test_an_empty_batch_gives_no_logits() -> None:
    decoder = Decoder.load(MemorySource(), device=CPU)
    assert PagedRun(decoder, [4]).step([[]])[0].shape == (0, tiny.VOCAB)


def test_a_batch_with_another_number_of_groups_is_refused() -> None:
    decoder = Decoder.load(MemorySource(), device=CPU)
    empty = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(empty, empty, torch.zeros(1).int(), empty.int(), empty, ())
    with pytest.raises(ValueError, match=r"batch\.groups has 0 entries, expected 1"):
        decoder.forward(batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_attended_is_what_the_pool_holds(dtype: torch.dtype) -> None:
    """In a half-precision pool, prefill sees rounded K and V just as a later decode does."""
    decoder = Decoder.load(MemorySource(), device=CPU)
    ids = list(range(30))
    whole = PagedRun(decoder, [30], kv_dtype=dtype).step([ids])[0]
    run = PagedRun(decoder, [30], kv_dtype=dtype)
    single = torch.cat([run.step([[token]])[0] for token in ids])
    full_precision = PagedRun(decoder, [30]).step([ids])[0]
    assert (whole - single).abs().max() < 0.1 * (whole - full_precision).abs().max()
