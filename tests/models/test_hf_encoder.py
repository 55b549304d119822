"""The two ways into the `tokenizers` library, for short texts and for long ones, give the same tokens."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers
from vocabularies import MERGES, SPECIALS, byte_alphabet

from kvstrata.models.hf_encoder import HFEncoder


@pytest.mark.parametrize("parse_special", [False, True])
def test_a_long_text_has_the_tokens_of_its_short_parts(parse_special: bool) -> None:
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    backend = tokenizers.Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(SPECIALS)
    encoder = HFEncoder(backend)
    part = f"the cat\nabc {SPECIALS[0]} the \u00e9t\u00e9\n"
    once = encoder.encode(part, parse_special)
    assert encoder.encode(part * 1000, parse_special) == once * 1000
