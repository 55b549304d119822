"""All layers at one native go give the bits of the loop over operators, which is their specification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRun
from real import RealModel, bits, run
from test_decoder_random import VARIANTS, random_model

from kvstrata import SamplingParams, kernels
from kvstrata.models.decoder import Decoder
from kvstrata.models.source import open_source

pytestmark = pytest.mark.skipif(
    kernels.backend() == "reference", reason="there are no native kernels to go through"
)

TEXT = (Path(__file__).parents[2] / "src/kvstrata/cli/demo_handbook.txt").read_text()


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    scope="module", params=["llama-biases", "mistral-window", "qwen2", "qwen3", "gemma3", "gemma3-mqa-untied"]
)
def random(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A decoder of random weights in eight bits."""
    folder = tmp_path_factory.mktemp("model")
    random_model(*VARIANTS[request.param]).save_pretrained(folder)
    source = open_source(folder)
    try:
        return Decoder.load(source, weights="int8", device=torch.device("cpu"))
    finally:
        source.close()


def steps(decoder: Decoder, kv_dtype: torch.dtype) -> list[torch.Tensor]:
    """Three sequences that prefill, decode or rest beside each other."""
    ids = torch.randint(3, 300, (61,), generator=torch.Generator().manual_seed(3)).tolist()
    paged = PagedRun(decoder, [61] * 3, kv_dtype=kv_dtype)
    work = [
        (ids[:30], ids[:40], []),
        ([], ids[40:41], []),
        (ids[30:31], ids[41:42], ids[:50]),
        (ids[31:], [], ids[50:]),
    ]
    return [rows for step in work for rows in paged.step(step)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_architecture(random: Decoder, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    at_one_go = steps(random, kv_dtype)
    monkeypatch.setattr(random, "_stack", None)
    for mine, expected in zip(at_one_go, steps(random, kv_dtype), strict=True):
        assert torch.equal(mine, expected)


@pytest.fixture(scope="module", params=["smollm2_path", "gemma_path"])
def model(request: pytest.FixtureRequest) -> RealModel:
    return RealModel.load(request.getfixturevalue(request.param), weights="auto")


def answers(model: RealModel, kv_dtype: str, retention: str = "full") -> list[object]:
    engine = model.engine(kv_dtype=kv_dtype)
    ids = model.tokenizer.encode(TEXT)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True, retention=retention)
    for n in range(3):
        engine.add_request(str(n), ids[9 * n : 100 + 50 * n], params)
    return [bits(result.outputs[0]) for _, result in sorted(run(engine).items())]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3", "int8", "int4"])
def test_every_pool_format(model: RealModel, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_one_go = answers(model, kv_dtype)
    monkeypatch.setattr(model.decoder, "_stack", None)
    assert at_one_go == answers(model, kv_dtype)


@pytest.mark.parametrize("retention", ["window:40", "sinks:4+40"])
def test_with_retention(model: RealModel, retention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_one_go = answers(model, "bf16", retention)
    monkeypatch.setattr(model.decoder, "_stack", None)
    assert at_one_go == answers(model, "bf16", retention)


def test_key_offsets(model: RealModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model.decoder.config
    offset = torch.linspace(-1, 1, config.num_kv_heads * config.head_dim).view(
        config.num_kv_heads, config.head_dim
    )
    plain = answers(model, "int8")
    offsets = {0: offset, config.num_layers - 1: offset}
    model.decoder.offset_keys(offsets)
    at_one_go = answers(model, "int8")
    monkeypatch.setattr(model.decoder, "_stack", None)
    assert at_one_go == answers(model, "int8")
    assert at_one_go != plain
    monkeypatch.undo()
    model.decoder.offset_keys(dict.fromkeys(offsets, torch.zeros_like(offset)))
    assert answers(model, "int8") == plain


def test_a_draft_of_the_first_layers(model: RealModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model.decoder.first_layers(3)
    ids = model.tokenizer.encode(TEXT)[:50]
    at_one_go = PagedRun(first, [len(ids)]).step([ids])[0]
    monkeypatch.setattr(first, "_stack", None)
    assert torch.equal(at_one_go, PagedRun(first, [len(ids)]).step([ids])[0])


def test_a_wrong_batch_raises_and_leaves_the_threads_usable(model: RealModel) -> None:
    paged = PagedRun(model.decoder, [40])
    ids = model.tokenizer.encode(TEXT)[:20]
    paged._tables[0][:] = 10_000
    with pytest.raises(ValueError, match=r"block_tables\[0, 0\] is 10000"):
        paged.step([ids])
    assert PagedRun(model.decoder, [40]).step([ids])[0].isfinite().all()


class Recorder:
    """Stands in front of a native stack and keeps the arguments of its last step."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.arguments: list[Any] = []

    def run(self, *arguments: Any) -> torch.Tensor:
        hidden, *rest = arguments
        self.arguments = [hidden.clone(), *rest]
        logits: torch.Tensor = self.native.run(*arguments)
        return logits


# What may be changed of a step, by its place among the arguments.
HIDDEN, ROWS, STARTS, LENS, KV, TABLES, SLOTS = range(7)
SCALES, COS, SIN, WINDOWS, SINKS, SINK_COS, SINK_SIN = range(7, 14)
Change = Callable[[list[Any]], dict[int, Any]]


def two_behind_sinks(arguments: list[Any]) -> dict[int, Any]:
    return {
        WINDOWS: torch.tensor([4], dtype=torch.int32),
        SINKS: torch.tensor([2], dtype=torch.int32),
        SINK_COS: list(arguments[COS]),
        SINK_SIN: list(arguments[SIN]),
    }


WRONG: dict[str, Change] = {
    "a row that is none of the tokens": lambda a: {ROWS: a[ROWS] + 1},
    "a negative row": lambda a: {ROWS: a[ROWS] - 1},
    "rows of floats": lambda a: {ROWS: a[ROWS].float()},
    "rows of two axes": lambda a: {ROWS: a[ROWS].unsqueeze(0)},
    "hidden of three axes": lambda a: {HIDDEN: a[HIDDEN].unsqueeze(0)},
    "hidden elsewhere": lambda a: {HIDDEN: a[HIDDEN].to("meta")},
    "a pool elsewhere": lambda a: {KV: [kv.to("meta") for kv in a[KV]]},
    "rotations elsewhere": lambda a: {COS: [cos.to("meta") for cos in a[COS]]},
    "tables that are sparse": lambda a: {TABLES: [table.to_sparse() for table in a[TABLES]]},
    "no groups": lambda _: {SLOTS: []},
    "no rotations": lambda _: {SIN: []},
    "no rotations for sinks": lambda a: {**two_behind_sinks(a), SINK_COS: []},
    "rotations for sinks that are None": lambda a: {**two_behind_sinks(a), SINK_COS: [None] * len(a[COS])},
    "half of the rotations for sinks": lambda a: {**two_behind_sinks(a), SINK_SIN: []},
    "narrow rotations for sinks": lambda a: {**two_behind_sinks(a), SINK_COS: [c[:, :3] for c in a[COS]]},
}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("random", ["llama-biases"], indirect=True)
@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_parts_that_do_not_fit_together_are_named(
    random: Decoder, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = random._stack
    assert stack is not None
    recorder = Recorder(stack._native)
    monkeypatch.setattr(stack, "_native", recorder)
    PagedRun(random, [16]).step([list(range(3, 16))])
    with torch.inference_mode():
        recorder.native.run(*recorder.arguments)
        for place, wrong in change(recorder.arguments).items():
            recorder.arguments[place] = wrong
        with pytest.raises(ValueError, match=r"\w+: \w"):
            recorder.native.run(*recorder.arguments)


@pytest.mark.parametrize("random", ["llama-biases"], indirect=True)
def test_an_offset_elsewhere_is_named(random: Decoder) -> None:
    offset = torch.zeros(random.config.num_kv_heads, random.config.head_dim, device="meta")
    with pytest.raises(ValueError, match="offset is"):
        random.offset_keys({0: offset})


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("random", ["llama-biases"], indirect=True)
def test_no_rows_wanted_give_no_logits(random: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = random._stack
    assert stack is not None
    recorder = Recorder(stack._native)
    monkeypatch.setattr(stack, "_native", recorder)
    PagedRun(random, [16]).step([list(range(3, 16))])
    recorder.arguments[ROWS] = recorder.arguments[ROWS][:0]
    with torch.inference_mode():
        assert recorder.native.run(*recorder.arguments).shape == (0, random.config.vocab_size)
