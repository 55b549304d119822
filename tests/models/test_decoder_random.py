"""Every architecture, RoPE scaling and head layout against a random model that Transformers saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRun
from torch import Tensor

from kvstrata.models.decoder import Decoder
from kvstrata.models.source import open_source

transformers = pytest.importorskip("transformers")

LENGTH = 61
TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # wide enough that attention is far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-attention-factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
    },
}


def scaled(name: str, theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_type": name.split("-", maxsplit=1)[0], "rope_theta": theta, **SCALINGS[name]}


def gemma_rope(kind: str = "default", **scaling: float) -> dict[str, dict[str, Any]]:
    return {
        "full_attention": {"rope_type": kind, "rope_theta": 1_000_000.0, **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }


GEMMA = {
    "num_hidden_layers": 7,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"],
    "sliding_window": 20,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    **{f"llama-{name}": ("Llama", {"rope_parameters": scaled(name)}) for name in SCALINGS},
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": scaled("yarn")}),
    "qwen3": ("Qwen3", {}),
    "qwen3-mqa-linear": ("Qwen3", {"num_key_value_heads": 1, "rope_parameters": scaled("linear")}),
    "gemma3": ("Gemma3", {**GEMMA, "rope_parameters": gemma_rope()}),
    "gemma3-linear": ("Gemma3", {**GEMMA, "rope_parameters": gemma_rope("linear", factor=8.0)}),
    "gemma3-mqa-untied": (
        "Gemma3",
        {**GEMMA, "num_key_value_heads": 1, "tie_word_embeddings": False, "rope_parameters": gemma_rope()},
    ),
}


def random_model(family: str, changes: dict[str, Any]) -> Any:
    """A Transformers model whose every parameter is random: fresh norms and biases are all ones and zeros."""
    torch.manual_seed(1)
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + suffix)(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def whole(decoder: Decoder, ids: list[int]) -> Tensor:
    return PagedRun(decoder, [len(ids)]).step([ids])[0]


def in_chunks(decoder: Decoder, ids: list[int], size: int = 7) -> Tensor:
    run = PagedRun(decoder, [len(ids)], block_size=4)
    return torch.cat([run.step([ids[i : i + size]])[0] for i in range(0, len(ids), size)])


def token_by_token(decoder: Decoder, ids: list[int]) -> Tensor:
    return in_chunks(decoder, ids, 1)


def beside_others(decoder: Decoder, ids: list[int]) -> Tensor:
    """The middle one of three sequences, at steps in which the others prefill, decode or rest."""
    run = PagedRun(decoder, [len(ids)] * 3)
    other = ids[::-1]
    steps = [
        (other[:30], ids[:40], []),
        (other[30:31], ids[40:41], other[:50]),
        ([], ids[41:44], other[50:51]),
        (other[31:32], ids[44:45], other[51:52]),
        (other[32:60], ids[45:], []),
    ]
    return torch.cat([run.step(step)[1] for step in steps])


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(decoder, token ids, the log-probabilities that Transformers gives)."""
    folder: Path = tmp_path_factory.mktemp("model")
    model = random_model(*VARIANTS[request.param])
    model.save_pretrained(folder)
    ids = torch.randint(3, 300, (LENGTH,))
    with torch.no_grad():
        expected = model(ids.unsqueeze(0)).logits[0].log_softmax(-1)
    source = open_source(folder)
    decoder = Decoder.load(source, weights="fp32", device=torch.device("cpu"))
    source.close()
    return decoder, ids.tolist(), expected


@pytest.mark.parametrize("feed", [whole, in_chunks, token_by_token, beside_others])
def test_log_probabilities_match_transformers(
    variant: Any, feed: Callable[[Decoder, list[int]], Tensor]
) -> None:
    decoder, ids, expected = variant
    assert (feed(decoder, ids) - expected).abs().max() < TOLERANCE
