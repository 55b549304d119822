from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from vocabularies import MERGES, PIECES, SPECIALS, byte_alphabet

from kvstrata.errors import ModelError
from kvstrata.models.tokenizer_folder import tokenizer_from_folder


def byte_level() -> tokenizers.Tokenizer:
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    backend = tokenizers.Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens([AddedToken("<user>", normalized=False)])
    return backend


def sentencepiece(metaspace: bool = False) -> tokenizers.Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "b"), ("ab", "c")]
    model = models.BPE({t: n for n, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


TEXTS = ["the", " the  cat\n\n", "é 한 👩‍👧", "123 it's", "", "a ☃ b"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("build", [byte_level, sentencepiece, lambda: sentencepiece(metaspace=True)])
def test_ids_and_text_are_those_of_the_tokenizers_library(tmp_path: Path, build: Any, text: str) -> None:
    backend = build()
    tokenizer = tokenizer_from_folder(save(tmp_path, backend))
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == backend.decode(backend.encode(text).ids)


def test_special_tokens_are_text_unless_parsed(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(save(tmp_path, byte_level()))
    (end,) = tokenizer.encode("<|im_end|>", parse_special=True)
    assert tokenizer.special_ids >= {end}
    assert not tokenizer.special_ids.intersection(tokenizer.encode("<|im_end|>"))
    assert tokenizer.decode([end], skip_special_tokens=False) == "<|im_end|>"
    assert len(tokenizer.encode("<user>")) == 1


def test_bos_and_eos_are_read_from_the_files_beside(tmp_path: Path) -> None:
    folder = save(
        tmp_path,
        sentencepiece(),
        tokenizer_config={"bos_token": {"content": "<s>"}},
        special_tokens_map={"eos_token": "</s>"},
        generation_config={"eos_token_id": [2, 7]},
        config={"eos_token_id": 9},
    )
    tokenizer = tokenizer_from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.bos_token) == (1, "<s>")
    assert tokenizer.eos_token_ids == (2, 7, 9)
    assert tokenizer.prefix_ids == (1,)


def test_the_config_overrides_whether_bos_is_added(tmp_path: Path) -> None:
    without = save(tmp_path, sentencepiece(), tokenizer_config={"bos_token": "<s>", "add_bos_token": False})
    assert tokenizer_from_folder(without).encode("the")[0] != 1


def test_chat_template_is_found_wherever_files_keep_it(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level())
    assert tokenizer_from_folder(folder).chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "in json"}')
    assert tokenizer_from_folder(folder).chat_template == "in json"
    named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "by name"}]
    save(folder, byte_level(), tokenizer_config={"chat_template": named})
    assert tokenizer_from_folder(folder).chat_template == "by name"
    (folder / "chat_template.jinja").write_text("in a file")
    assert tokenizer_from_folder(folder).chat_template == "in a file"


def test_a_missing_file_is_named_with_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing; .*save_pretrained"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff", b'{"model": 3}', b"[]"])
def test_a_damaged_tokenizer_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_config_beside_it_is_named(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: "):
        tokenizer_from_folder(tmp_path)


def test_an_unknown_kind_of_decoder_is_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"decoder \['WordPiece'\] is not supported"):
        tokenizer_from_folder(save(tmp_path, backend))
