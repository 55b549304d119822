"""Records token ids of the reference implementations for the two test models.

    python tests/data/tokenizer/record.py SMOLLM2.gguf GEMMA.gguf

Needs transformers, sentencepiece, protobuf and gguf. SmolLM2: Transformers' tokenizer of the file, with the
pre-tokenizer of the model's published tokenizer.json (digits one by one, then GPT-2's words), which
Transformers does not take from GGUF. Gemma: SentencePiece itself over the file's pieces and scores.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

HERE = Path(__file__).parent


def smollm2_ids(path: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def gemma_ids(path: Path, texts: list[str]) -> list[list[int]]:
    fields = gguf.GGUFReader(path).fields
    model = proto.ModelProto()
    for token, kind, score in zip(
        *(fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "scores")),
        strict=True,
    ):
        piece = model.pieces.add()
        piece.piece = token.replace(" ", "\u2581") if kind == gguf.TokenType.USER_DEFINED else token
        piece.score, piece.type = score, 2 if token == "<unk>" else kind
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = proto.TrainerSpec.BPE, True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    trainer.pad_piece, trainer.eos_piece, trainer.bos_piece = "<pad>", "<eos>", "<bos>"
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    return [processor.encode(text) for text in texts]


def main() -> None:
    smollm2, gemma = map(Path, sys.argv[1:])
    texts = json.loads((HERE / "texts.json").read_text(encoding="utf-8"))
    made_on = {name: version(name) for name in ("transformers", "tokenizers", "sentencepiece", "gguf")}
    made_on["python"] = platform.python_version()
    for name, ids in (("smollm2", smollm2_ids(smollm2, texts)), ("gemma", gemma_ids(gemma, texts))):
        cases = [{"text": text, "ids": found} for text, found in zip(texts, ids, strict=True)]
        lines = ",\n  ".join(json.dumps(case) for case in cases)
        made = json.dumps(made_on)
        (HERE / f"{name}.json").write_text(
            f'{{"made_on": {made},\n "cases": [\n  {lines}\n]}}\n', encoding="utf-8"
        )


if __name__ == "__main__":
    main()
