"""Write a GGUF file of Llama-1B shape with random weights: for speed alone, it says nothing sensible.

Q4_K projections with a Q6_K embedding that is also the head, as in the Q4_K_M files that people have. The
tokenizer is that of another GGUF file, filled up with unused tokens.

Usage: python benchmarks/make_llama_1b.py TOKENIZER.gguf OUT.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from kvstrata.models.gguf import GGUFFile

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 8192, 16, 32, 8, 64, 128_256
SCALE = 2.0**-13  # of a super-block; with random 6-bit scales and codes, weights are some hundredths


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source = GGUFFile.open(Path(sys.argv[1]))
    writer = gguf.GGUFWriter(sys.argv[2], "llama")
    write_metadata(writer, source)
    rng = np.random.default_rng(0)
    kind = GGMLQuantizationType.Q6_K
    add(writer, rng, "token_embd", outputs=VOCAB, inputs=HIDDEN, kind=kind)
    for layer in range(LAYERS):
        for name, outputs, inputs in (
            ("attn_q", HEADS * HEAD_DIM, HIDDEN),
            ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD_DIM),
            ("ffn_gate", INNER, HIDDEN),
            ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ):
            kind = GGMLQuantizationType.Q4_K
            add(writer, rng, f"blk.{layer}.{name}", outputs=outputs, inputs=inputs, kind=kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def write_metadata(writer: gguf.GGUFWriter, source: GGUFFile) -> None:
    known = source.metadata
    tokens = [*known["tokenizer.ggml.tokens"]]
    types = [*(int(kind) for kind in known["tokenizer.ggml.token_type"])]
    unused = VOCAB - len(tokens)
    writer.add_name("random weights of Llama-1B shape")
    writer.add_file_type(15)
    writer.add_quantization_version(2)
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(known["tokenizer.ggml.pre"])
    writer.add_token_list([*tokens, *(f"<unused{n}>" for n in range(unused))])
    writer.add_token_types([*types, *([5] * unused)])
    writer.add_token_merges(known["tokenizer.ggml.merges"])
    for name in ("bos", "eos", "padding"):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", int(known[f"tokenizer.ggml.{name}_token_id"]))
    writer.add_add_bos_token(False)


def add(
    writer: gguf.GGUFWriter,
    rng: np.random.Generator,
    name: str,
    *,
    outputs: int,
    inputs: int,
    kind: GGMLQuantizationType,
) -> None:
    """A weight of random codes and scales; only the half-precision scales of super-blocks are set."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (outputs, inputs // block, size), dtype=np.uint8)
    half = np.frombuffer(np.float16(SCALE).tobytes(), dtype=np.uint8)
    if kind == GGMLQuantizationType.Q4_K:  # d and dmin in front; the minimum centres the codes
        blocks[:, :, 0:2] = half
        blocks[:, :, 2:4] = np.frombuffer(np.float16(SCALE * 7.5).tobytes(), dtype=np.uint8)
    else:  # Q6_K: d behind
        blocks[:, :, 208:210] = half
    data = blocks.reshape(outputs, -1)
    writer.add_tensor(f"{name}.weight", data, raw_shape=data.shape, raw_dtype=kind)


if __name__ == "__main__":
    main()
