"""Settings as options: each field of a settings class is declared once, and every command can take it.

A command asks for `config: EngineConfig` or `params: SamplingParams`; `with_settings` shows the fields as
options in that parameter's place and hands the command one validated object. One that asks for
`configs: list[EngineConfig]` gets several where options name several values, as in `--kv-dtype fp32,int8`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

from kvstrata.cache.retention import Retention
from kvstrata.config import (
    DEVICES,
    KV_DTYPES,
    LOAD_MODES,
    POLICIES,
    WEIGHT_MODES,
    EngineConfig,
    SamplingParams,
)
from kvstrata.errors import ConfigError

# Fields that are options, with the type that the command line reads and what --help says.
_ENGINE: Mapping[str, tuple[Any, str]] = {
    "model": (str | None, "GGUF file, Hugging Face folder, or smollm2 (the default) or gemma3-270m."),
    "device": (str, f"Where to run: {', '.join(DEVICES)}."),
    "weights": (str, f"How weights are held: {', '.join(WEIGHT_MODES)}."),
    "kv_dtype": (str, f"Format of the KV pool: {', '.join(KV_DTYPES)}."),
    "kv_dtype_skip_layers": (
        str,
        "Layers kept in --kv-dtype-skipped, such as 0,1,-1; negative from the end.",
    ),
    "kv_dtype_skipped": (str, "Format of those layers."),
    "kv_memory": (str, "Memory of the KV pool, such as 2GiB; auto takes a share of what is free."),
    "block_size": (int, "Tokens a block."),
    "max_model_len": (int | None, "Most tokens of a sequence, prompt and answer; by default what fits."),
    "max_num_seqs": (int, "Most sequences in one step."),
    "max_num_batched_tokens": (int, "Most tokens in one step."),
    "policy": (str, f"Which cached blocks go first when space is wanted: {', '.join(POLICIES)}."),
    "ttl": (float | None, "Seconds that cached blocks live; by default for ever."),
    "prefix_caching": (bool, "Find the blocks of earlier requests again."),
    "retention": (
        str,
        "Which tokens a query sees: full, window:W (the last W) or sinks:S+W (the first S besides), "
        "for texts without end in constant memory.",
    ),
    "threads": (int | None, "CPU threads; by default all cores."),
    "draft": (str | None, "Propose tokens ahead: ngram, or layers:K (the model's own first K layers)."),
    "draft_model": (str | None, "A smaller model of the same vocabulary that proposes tokens ahead."),
    "draft_tokens": (int, "Most tokens proposed for a sequence in a step."),
    "draft_adaptive": (bool, "Propose as many tokens as pay; otherwise always --draft-tokens."),
    "tiers": (
        list[str],
        "A place below the pool: ram://?size=4GiB, disk:///PATH?size=64GiB, valkey://HOST:PORT,HOST:PORT; "
        "several times, nearest first.",
    ),
    "load_mode": (str, f"Whether blocks found in a tier are loaded: {', '.join(LOAD_MODES)}."),
    "refresh_beta": (float, "How early cached blocks that expire are refreshed when found; 0: not at all."),
    "ttl_jitter": (float, "Share by which times to live are shortened at random."),
    "audit": (float, "Share of loaded blocks to compute again, when idle, and compare bit for bit."),
}
_SAMPLING: Mapping[str, tuple[Any, str]] = {
    "max_tokens": (int, "Most tokens of the answer."),
    "temperature": (float, "0 takes the likeliest token each time."),
    "top_p": (float, "Draw from the likeliest tokens that make up this share."),
    "top_k": (int, "Draw from so many likeliest tokens; 0 takes all."),
    "min_p": (float, "Leave out tokens less than this share as likely as the likeliest."),
    "repetition_penalty": (float, "Above 1, tokens seen before become less likely."),
    "presence_penalty": (float, "Taken off the logit of each token in the answer so far."),
    "frequency_penalty": (float, "The same, for each time it is there."),
    "seed": (int | None, "Makes the draw repeat."),
    "stop": (list[str], "Text that ends the answer; can be given several times."),
    "ignore_eos": (bool, "Go on past the model's end token."),
    "min_tokens": (int, "No end before so many tokens."),
}
_OPTIONS: Mapping[type, Mapping[str, tuple[Any, str]]] = {EngineConfig: _ENGINE, SamplingParams: _SAMPLING}
# Fields of which a command that takes a list of configs can be given several, with commas between them.
_SEVERAL = ("kv_dtype", "retention")
# Options that are called otherwise than their field.
_FLAGS: Mapping[str, str] = {"tiers": "tier"}
# On the command line an answer is to be the same each time, and not cut after a line.
_DEFAULTS: Mapping[type, Mapping[str, Any]] = {
    EngineConfig: {"tiers": [], "kv_dtype_skip_layers": ""},
    SamplingParams: {"temperature": 0.0, "max_tokens": 256, "stop": []},
}


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Expand the parameters of a command that are settings classes into one option a field."""
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    expanded: list[inspect.Parameter] = []
    classes: dict[str, type] = {}
    for name, parameter in signature.parameters.items():
        hint: Any = hints.get(name)
        if hint in _OPTIONS or hint == list[EngineConfig]:
            classes[name] = hint
            expanded.extend(_parameters(EngineConfig if hint == list[EngineConfig] else hint))
        else:
            expanded.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        for name, cls in classes.items():
            if cls == list[EngineConfig]:
                values = {key: given.pop(key) for key in _ENGINE}
                given[name] = [_settings(EngineConfig, each) for each in _each(values)]
            else:
                given[name] = _settings(cls, {key: given.pop(key) for key in _OPTIONS[cls]})
        return command(**given)

    run.__signature__ = signature.replace(parameters=expanded)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in expanded}
    return run


def _each(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings once for each combination of the values of those that have several."""
    several = {name: str(values[name]).split(",") for name in _SEVERAL}
    for chosen in itertools.product(*several.values()):
        yield values | dict(zip(several, chosen, strict=True))


def _parameters(cls: type) -> list[inspect.Parameter]:
    own = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
    parameters = []
    for name, (kind, text) in _OPTIONS[cls].items():
        flag = option_name(name)
        declared = f"--{flag}/--no-{flag}" if kind is bool and own[name] else f"--{flag}"
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_DEFAULTS[cls].get(name, own[name]),
                annotation=Annotated[kind, typer.Option(declared, help=text)],
            )
        )
    return parameters


def option_name(name: str) -> str:
    """What the option of a field is called, without its dashes."""
    return _FLAGS.get(name, name.replace("_", "-"))


def _settings(cls: type, values: dict[str, Any]) -> Any:
    try:
        if "retention" in values:
            Retention.parse(values["retention"])
        return cls(**values)
    except ConfigError as error:
        message = str(error)
        for name in values:  # the user wrote --kv-memory, not kv_memory
            if message.startswith(f"{name} "):
                message = f"--{option_name(name)} {message.removeprefix(name).lstrip()}"
        raise typer.BadParameter(message) from None


def declared(cls: type) -> Mapping[str, tuple[Any, str]]:
    """The fields of a settings class that are options: the type that is read, and what --help says."""
    return _OPTIONS[cls]
