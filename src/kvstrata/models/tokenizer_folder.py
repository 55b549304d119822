"""A tokenizer from a Hugging Face folder: `tokenizer.json` and the small files beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kvstrata.errors import ModelError
from kvstrata.models.hf_encoder import HFEncoder
from kvstrata.models.tokenizer import SPACE_MARK, Tokenizer, Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder.

    Reads `tokenizer.json`, and where present `tokenizer_config.json`, `special_tokens_map.json`,
    `generation_config.json`, `config.json` and `chat_template.jinja`. Raises ModelError naming the file that
    is missing or damaged, or the part that is not supported.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path}: missing; the folder needs a tokenizer.json (`AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...)` of Transformers writes one)"
        )
    try:
        text = path.read_text(encoding="utf-8")
        description = json.loads(text)
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: cannot be read: {error}") from error
    config = _json(folder / "tokenizer_config.json")
    named = {**_json(folder / "special_tokens_map.json"), **config}
    vocabulary = _vocabulary(path, backend, description)
    bos, eos = (_token_id(backend, named.get(name)) for name in ("bos_token", "eos_token"))
    prefix, suffix = _around(backend)
    if isinstance(add_bos := config.get("add_bos_token"), bool):
        prefix = (bos,) if add_bos and bos is not None else ()
    if isinstance(add_eos := config.get("add_eos_token"), bool):
        suffix = (eos,) if add_eos and eos is not None else ()
    return Tokenizer(
        encoder=HFEncoder(backend),
        vocabulary=vocabulary,
        bos_token_id=bos,
        eos_token_ids=_end_tokens(folder, eos),
        prefix_ids=prefix,
        suffix_ids=suffix,
        space_prefix=_has_space_prefix(description),
        chat_template=_chat_template(folder, config),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _token_id(backend: tokenizers.Tokenizer, token: object) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    found: int | None = backend.token_to_id(text)
    return found


def _parts(part: object) -> Iterator[Mapping[str, Any]]:
    """A part of tokenizer.json and, where it is a sequence, the parts within."""
    if isinstance(part, dict):
        yield part
        for key in ("decoders", "normalizers", "pretokenizers", "processors"):
            for inner in part.get(key) or ():
                yield from _parts(inner)


def _types(part: object) -> set[str]:
    return {str(inner.get("type")) for inner in _parts(part)}


def _vocabulary(path: Path, backend: tokenizers.Tokenizer, description: Mapping[str, Any]) -> Vocabulary:
    decoders = _types(description.get("decoder"))
    marks_spaces = "Metaspace" in decoders or any(
        part.get("type") == "Replace" and part.get("pattern") == {"String": SPACE_MARK}
        for part in _parts(description.get("decoder"))
    )
    if "ByteLevel" not in decoders and not marks_spaces:
        raise ModelError(
            f"{path}: decoder {sorted(decoders) or None} is not supported; supported are ByteLevel, and "
            f"Metaspace or Replace of {SPACE_MARK!r} (SentencePiece)"
        )
    byte_level = "ByteLevel" in decoders
    ids = backend.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    added = backend.get_added_tokens_decoder()
    byte_of = {}
    if "ByteFallback" in decoders:
        byte_of = {
            token_id: int(match[1], 16)
            for token, token_id in ids.items()
            if (match := _BYTE_TOKEN.fullmatch(token)) and token_id not in added
        }
    return Vocabulary(
        tokens=tokens,
        byte_level=byte_level,
        literal={
            token_id: token.content if token.special or byte_level else token.content.replace(SPACE_MARK, " ")
            for token_id, token in added.items()
        },
        byte_of=byte_of,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
    )


def _has_space_prefix(description: Mapping[str, Any]) -> bool:
    """Whether encoding puts a space in front of a text, by any of the three ways files have for it."""
    for part in _parts(description.get("normalizer")):
        if part.get("type") == "Prepend" and part.get("prepend") in (SPACE_MARK, " "):
            return True
    return any(
        (part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        or (part.get("type") == "ByteLevel" and bool(part.get("add_prefix_space")))
        for part in _parts(description.get("pre_tokenizer"))
    )


def _around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the file's post-processor puts in front of a text and behind it."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return (), ()


def _end_tokens(folder: Path, eos: int | None) -> tuple[int, ...]:
    found = [] if eos is None else [eos]
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        found.extend(
            item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)
        )
    return tuple(dict.fromkeys(found))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
