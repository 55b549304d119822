"""Every setting, validated once at the edge, with its unit; the inside takes what it needs as arguments."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal

from kvstrata.errors import ConfigError

KV_DTYPES = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4")
WEIGHT_MODES = ("auto", "int8", "int4", "bf16", "fp32")
POLICIES = ("lru", "lrfu", "fifo", "ttl")
LOAD_MODES = ("auto", "always", "never")
LoadMode = Literal["auto", "always", "never"]
DEVICES = ("auto", "cpu", "cuda")
MAX_STOP_CHARS = 4096  # each answer has an automaton of them, which is made between two steps of all
MAX_DRAFT_TOKENS = 64
_DRAFT = re.compile(r"ngram|layers:[1-9][0-9]{0,4}", re.ASCII)
MAX_THREADS = 1024  # each costs memory and a place among the processes; no machine gains from more

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}{s}": 1000**i for i, p in enumerate("kmgt", 1) for s in ("", "b")},
    **{f"{p}i{s}": 1024**i for i, p in enumerate("kmgt", 1) for s in ("", "b")},
}


def parse_bytes(text: str | int, field_name: str) -> int:
    """Bytes from a number with a unit: `4GiB`, `512M`, `1.5gb`, `1048576`.

    KB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB powers of 1024. Raises ConfigError otherwise.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text <= 0:
            raise ConfigError(f"{field_name} is {text}; it must be a positive number of bytes")
        return text
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", str(text), re.ASCII)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{field_name} is {text!r}; give a size such as 4GiB, 512MiB or 1048576")
    value = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if value <= 0:
        raise ConfigError(f"{field_name} is {text!r}; it must be more than zero bytes")
    return value


def parse_layers(layers: object) -> tuple[int, ...]:
    """Numbers of layers, from a list or from text such as `0,1,-1`. Raises ConfigError otherwise."""
    listed = (
        [part for part in layers.split(",") if layers.strip()] if isinstance(layers, str) else _listed(layers)
    )
    try:
        numbers = tuple(int(part) if isinstance(part, str) else part for part in listed or ())
    except ValueError:
        numbers = (None,)
    _check(
        listed is not None and all(_is_int(number) for number in numbers),
        "kv_dtype_skip_layers",
        layers,
        "it must be numbers of layers such as 0,1,-1",
    )
    return numbers


def layers_of(layers: Iterable[int], num_layers: int) -> frozenset[int]:
    """Those layers of a model of `num_layers`, negative numbers counted from the end.

    Raises ConfigError for a number without a layer, and where no layer would be left.
    """
    given = tuple(layers)
    for layer in given:
        if not -num_layers <= layer < num_layers:
            raise ConfigError(
                f"kv_dtype_skip_layers has layer {layer}; the model's are 0 to {num_layers - 1}, "
                f"or -{num_layers} to -1 from the end"
            )
    chosen = frozenset(layer % num_layers for layer in given)
    if len(chosen) == num_layers:
        raise ConfigError(
            f"kv_dtype_skip_layers has all {num_layers} layers; leave some out, or set kv_dtype itself"
        )
    return chosen


def _check(ok: bool, name: str, value: object, right: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; {right}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)  # half a surrogate pair has no UTF-8


def _check_flag(name: str, value: object) -> None:
    _check(isinstance(value, bool), name, value, "it must be True or False")


def _check_retention(value: object) -> None:
    _check(isinstance(value, str), "retention", value, "give full, window:W or sinks:S+W, as sinks:4+1020")


def _listed(value: object) -> tuple[Any, ...] | None:
    """The entries of a list, of nothing at all, or None where it is no list (a text is none)."""
    if value is None:
        return ()
    return None if isinstance(value, str | bytes) or not isinstance(value, Iterable) else tuple(value)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    limit = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    ok = _is_int(value) and low <= value and (high is None or value <= high)  # type: ignore[operator]
    _check(ok, name, value, f"it must be {limit}")


def _check_number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    ok = _is_number(value) and low <= value <= high and not (above_low and value == low)  # type: ignore[operator]
    start = f"above {low:g}" if above_low else f"from {low:g}"
    _check(ok, name, value, f"it must be a number {start} to {high:g}")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. Raises ConfigError naming the field, its value and what would be right.

    model: a GGUF file, a Hugging Face folder, or the name of an installed model package (None: the default
        model). device: `auto` takes CUDA where there is one. weights: how weights are held. kv_dtype: format
        of the pool.
    block_size: tokens a block. kv_memory: bytes of the pool (a number, or text such as `4GiB`), or `auto`.
    max_model_len: most tokens of a sequence, prompt and answer together (None: what model and pool allow).
    max_num_seqs: most sequences in one step. max_num_batched_tokens: token budget of a step.
    policy: eviction order (`lru`, `lrfu`, `fifo`, `ttl`). ttl: seconds a cached block lives (None: for ever).
    kv_dtype_skip_layers: layers that keep K and V in kv_dtype_skipped, where that has at least the bits of
        kv_dtype: numbers, as a list or as text such as `0,1,-1`; negative ones count from the last layer.
    prefix_caching: whether finished blocks are found again. threads: CPU threads (None: all cores).
    seed: seed for requests that bring none (None: random). chat_template: template text that replaces the
        model's own.
    retention: which tokens a query sees where a request does not say: `full`, `window:W` (the last W) or
        `sinks:S+W` (the first S and the last W), in layers without a sliding window of their own.
    draft: how tokens are proposed ahead, to be verified in one step: `ngram` (what followed the last tokens
        when they came before) or `layers:K` (the model's own first K layers). draft_model: a smaller model
        of the same vocabulary that proposes instead; it shares kv_memory. draft_tokens: most of them a
        sequence and step. draft_adaptive: propose as many as pay, down to none; otherwise always so many.
    tiers: places below the pool, nearest first, as URLs (`ram://?size=4GiB`). load_mode: whether blocks found
        there are loaded: `auto` where that is quicker than to compute them. audit: share of loaded blocks
        that are computed again when there is nothing else to do, and compared bit for bit.
    refresh_beta: how early what expires is refreshed when requests find it, before it does (1: about when
        computing it again still ends in time; more: earlier; 0: not at all). ttl_jitter: share of times to
        live by which they are shortened at random, the same for all that a request adds, so that what was
        cached together does not expire together.
    """

    model: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    weights: Literal["auto", "int8", "int4", "bf16", "fp32"] = "auto"
    kv_dtype: Literal["fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4"] = "bf16"
    kv_dtype_skip_layers: str | Sequence[int] = ()
    kv_dtype_skipped: Literal["fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4"] = "bf16"
    block_size: int = 16
    kv_memory: str | int = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    policy: Literal["lru", "lrfu", "fifo", "ttl"] = "lru"
    ttl: float | None = None
    prefix_caching: bool = True
    threads: int | None = None
    seed: int | None = None
    chat_template: str | None = None
    retention: str = "full"
    draft: str | None = None
    draft_model: str | None = None
    draft_tokens: int = 16
    draft_adaptive: bool = True
    tiers: Sequence[str] = ()
    load_mode: LoadMode = "auto"
    audit: float = 0.0
    refresh_beta: float = 1.0
    ttl_jitter: float = 0.1

    def __post_init__(self) -> None:
        for name, choices in (
            ("device", DEVICES),
            ("weights", WEIGHT_MODES),
            ("kv_dtype", KV_DTYPES),
            ("kv_dtype_skipped", KV_DTYPES),
            ("policy", POLICIES),
            ("load_mode", LOAD_MODES),
        ):
            value = getattr(self, name)
            _check(value in choices, name, value, f"choose one of {', '.join(choices)}")
        object.__setattr__(self, "kv_dtype_skip_layers", parse_layers(self.kv_dtype_skip_layers))
        _check_int("block_size", self.block_size, 1, 4096)
        _check_int("max_num_seqs", self.max_num_seqs, 1, 4096)
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1_000_000)
        for name, high in (("max_model_len", 2**31 - 1), ("threads", MAX_THREADS)):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1, high)
        for name in ("model", "draft_model"):
            model: object = getattr(self, name)
            if isinstance(model, os.PathLike):
                object.__setattr__(self, name, os.fspath(model))
        for name in ("model", "draft_model", "chat_template"):
            value = getattr(self, name)
            _check(value is None or (isinstance(value, str) and value != ""), name, value, "it must be text")
        _check_flag("prefix_caching", self.prefix_caching)
        _check_retention(self.retention)
        self._check_draft()
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        if self.ttl is not None:
            _check_number("ttl", self.ttl, 0, 1e12, above_low=True)
        _check(self.policy != "ttl" or self.ttl is not None, "ttl", None, "policy ttl needs it, in seconds")
        if self.kv_memory != "auto":
            object.__setattr__(self, "kv_memory", parse_bytes(self.kv_memory, "kv_memory"))

        tiers = (self.tiers,) if isinstance(self.tiers, str) else _listed(self.tiers)
        _check(
            tiers is not None and len(tiers) <= 16 and all(isinstance(t, str) and t for t in tiers),
            "tiers",
            self.tiers,
            "it must be a list of URLs such as ram://?size=4GiB",
        )
        object.__setattr__(self, "tiers", tiers)
        _check(
            self.prefix_caching or not tiers, "tiers", self.tiers, "they need prefix_caching, which is off"
        )
        _check_number("audit", self.audit, 0, 1)
        _check_number("refresh_beta", self.refresh_beta, 0, 100)
        _check_number("ttl_jitter", self.ttl_jitter, 0, 0.9)

    def _check_draft(self) -> None:
        _check(
            self.draft is None or _DRAFT.fullmatch(str(self.draft)) is not None,
            "draft",
            self.draft,
            "give ngram, or layers:K with K the layers to propose with, such as layers:4",
        )
        _check(
            self.draft is None or self.draft_model is None,
            "draft_model",
            self.draft_model,
            f"and draft is {self.draft!r}: give one of the two",
        )
        _check_int("draft_tokens", self.draft_tokens, 1, MAX_DRAFT_TOKENS)
        _check_flag("draft_adaptive", self.draft_adaptive)

    @property
    def draft_layers(self) -> int | None:
        """The K of `layers:K`; None where something else proposes, or nothing does."""
        return int(self.draft.removeprefix("layers:")) if self.draft and self.draft != "ngram" else None

    @classmethod
    def from_mapping(cls, settings: dict[str, Any]) -> EngineConfig:
        """A config from named settings; an unknown name is a ConfigError that lists the known ones."""
        known = [f.name for f in fields(cls)]
        for name, value in settings.items():
            _check(name in known, name, value, f"no such setting; the settings are {', '.join(known)}")
        return cls(**settings)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens of one request are chosen; names and meaning follow vLLM's where it has them.

    n: answers. temperature: 0 is greedy. top_k: 0 or -1 keeps all. min_p: keeps tokens at least this share as
    likely as the likeliest. repetition_penalty applies to prompt and answer, presence_penalty and
    frequency_penalty to the answer. seed: makes the draw repeat, whatever else runs beside it.
    stop, stop_token_ids: end the answer (the text or token itself is left out unless
    include_stop_str_in_output); at most 16 texts, 4,096 characters together. min_tokens: no stop token before
    so many. max_tokens: None is as many as fit.
    logprobs, prompt_logprobs: how many of the likeliest tokens to report at each place, beside the token
    itself (None: no report); of the model's own distribution, before temperature and penalties.
    retention: which tokens a query sees, `full`, `window:W` or `sinks:S+W` (None: the engine's).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    retention: str | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, 128)
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1, above_low=True)
        _check_int("top_k", self.top_k, -1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, 100)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            _check_flag(name, getattr(self, name))
        if self.retention is not None:
            _check_retention(self.retention)
        stops = (self.stop,) if isinstance(self.stop, str) else _listed(self.stop)
        _check(
            stops is not None and len(stops) <= 16 and all(isinstance(s, str) and s for s in stops),
            "stop",
            self.stop,
            "it must be one to sixteen texts, none of them empty",
        )
        length = sum(map(len, stops or ()))
        if length > MAX_STOP_CHARS:
            raise ConfigError(f"stop has {length} characters; its texts may have {MAX_STOP_CHARS} in all")
        object.__setattr__(self, "stop_strings", stops)
        ids = _listed(self.stop_token_ids)
        _check(
            ids is not None and all(_is_int(t) and 0 <= t < 2**31 for t in ids),
            "stop_token_ids",
            self.stop_token_ids,
            "it must be a list of token ids",
        )
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class RequestOptions:
    """How a request is served, apart from how its tokens are chosen.

    cache_salt: blocks are shared only among requests of the same salt. adapter: name of weights on top of the
    model's; blocks are not shared between adapters. priority: lower goes first. user: waiting requests of one
    priority are served fairly between users. ttl: seconds its blocks stay cached (None: the engine's).
    """

    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    user: str = ""
    ttl: float | None = None

    def __post_init__(self) -> None:
        for name in ("cache_salt", "adapter", "user"):
            value = getattr(self, name)
            _check(isinstance(value, str) and _is_unicode(value), name, value, "it must be valid text")
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)
        if self.ttl is not None:
            _check_number("ttl", self.ttl, 0, 1e12, above_low=True)
