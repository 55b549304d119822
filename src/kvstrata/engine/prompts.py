"""What callers hand in, brought to one form: lists of prompts, of conversations, of sampling parameters.

Programs hand in lists, tuples, generators and arrays (numpy's, torch's); whatever else is refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstrata.config import RequestOptions, SamplingParams
from kvstrata.errors import RequestError

# A prompt is text, token ids, or a mapping with `prompt` or `prompt_token_ids`, as vLLM takes them.
Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_FORMS = "give text, token ids, or a mapping with 'prompt' or 'prompt_token_ids'"


def listed_prompts(prompts: Any) -> list[Any]:
    """A list of prompts: one prompt is text, a mapping, or token ids. Raises RequestError."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    entries = _entries("prompts", prompts, _FORMS + ", or a list of these")
    return [entries] if entries and _is_id(entries[0]) else entries


def text_and_ids(prompt: Any, encode: Callable[[str], list[int]]) -> tuple[str | None, list[int]]:
    """The text of a prompt, if it has one, and its token ids. Raises RequestError where it is no prompt."""
    if isinstance(prompt, str):
        return prompt, encode(prompt)
    if not isinstance(prompt, Mapping):
        return None, _token_ids("prompt", prompt)
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt: 'prompt' is {_shown(text)}; it must be text")
    if prompt.get("prompt_token_ids") is not None:
        return text, _token_ids("prompt_token_ids", prompt["prompt_token_ids"])
    if text is None:
        raise RequestError(
            f"prompt has the keys {sorted(map(str, prompt))}; give 'prompt' or 'prompt_token_ids' a value"
        )
    return text, encode(text)


def conversations(messages: Any) -> list[Any]:
    """A list of conversations, from one or several; what is in them is for the chat template to check."""
    form = "give a list of {'role': ..., 'content': ...}, or a list of such lists"
    if isinstance(messages, Mapping):
        raise RequestError(f"messages is {_shown(messages)}; {form}")
    entries = _entries("messages", messages, form)
    return [entries] if entries and isinstance(entries[0], Mapping) else entries


def params_for(params: Any, count: int) -> list[SamplingParams]:
    """Sampling parameters for each of `count` prompts, from none, one for all, or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    form = "give SamplingParams, or a list with one for each prompt"
    if isinstance(params, Mapping):
        raise RequestError(f"sampling_params is {_shown(params)}; {form}")
    entries = _entries("sampling_params", params, form)
    for entry in entries:
        if not isinstance(entry, SamplingParams):
            raise RequestError(f"sampling_params has {_shown(entry)}; {form}")
    if len(entries) != count:
        raise RequestError(
            f"sampling_params has {len(entries)} entries for {count} prompts; give one for each"
        )
    return entries


def check_options(options: Any) -> None:
    """Raise RequestError for options of another type."""
    if options is not None and not isinstance(options, RequestOptions):
        raise RequestError(f"options is {_shown(options)}; give RequestOptions or None")


def check_callback(name: str, function: Any) -> None:
    """Raise RequestError for a callback that cannot be called."""
    if function is not None and not callable(function):
        raise RequestError(f"{name} is {_shown(function)}; give a function or None")


def _entries(name: str, values: Any, form: str) -> list[Any]:
    refused = isinstance(values, str | bytes | bytearray | set | frozenset) or not isinstance(
        values, Iterable
    )
    try:
        if not refused:
            return list(values)
    except TypeError:  # an array without dimensions says that it is iterable
        pass
    raise RequestError(f"{name} is {_shown(values)}; {form}")


def _token_ids(name: str, values: Any) -> list[int]:
    entries = _entries(name, values, _FORMS)
    if set(map(type, entries)) == {int}:  # most prompts, and some are long
        return entries
    for entry in entries:
        if not _is_id(entry):
            raise RequestError(f"{name} holds {_shown(entry)}; token ids are whole numbers")
    return [operator.index(entry) for entry in entries]


def _is_id(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool)
    if getattr(value, "ndim", 0) > 0:  # a row of an array, even one of one element, is a prompt
        return False
    try:
        operator.index(value)
    except (TypeError, RuntimeError):
        return False
    return True


def _shown(value: object) -> str:
    """Type and value, shortened, for a one-line message."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
