"""What the decoder needs to know of a model, whatever file it came from.

Every supported architecture (llama incl. Mistral and SmolLM, qwen2, qwen3, gemma3 text) is one
`DecoderConfig`; the decoder branches on its fields, never on the architecture's name.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one layer (Su et al., RoFormer, arXiv 2104.09864).

    kind: how positions past the trained length are scaled. `linear` divides positions by `factor`;
    `llama3` is the frequency-dependent interpolation of Llama 3.1; `yarn` is arXiv 2309.00071.
    freq_factors: `[head_dim / 2]` divisors of the inverse frequencies, on top of `kind`, where a file gives
    them itself (a GGUF's `rope_freqs.weight`, which is how Llama 3.1 scaling is stored there).
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 * ln(factor) + 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between layers: the sliding window (None sees everything) and the RoPE base."""

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True)
class DecoderConfig:
    """A causal decoder with gated MLPs and RMSNorm.

    All norm weights are stored in the form `x * w` (a Gemma file's `1 + w` is added when loading).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    max_position: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float = 0.0  # 0: head_dim ** -0.5, set in __post_init__
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.attention_scale == 0.0:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)

    @property
    def num_layers(self) -> int:
        """How many layers the decoder has."""
        return len(self.layers)

    def layer_groups(self, apart: Set[int] = frozenset()) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
        """Layers that keep the same tokens: (window, layer indices), full attention first, then by window.

        apart: layers that share no group with others (theirs is another KV format, say); their groups come
        after those of the same window.
        """
        groups: dict[tuple[int | None, bool], list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault((layer.window, index in apart), []).append(index)
        order = sorted(groups, key=lambda group: (group[0] is not None, group[0] or 0, group[1]))
        return tuple((group[0], tuple(groups[group])) for group in order)
