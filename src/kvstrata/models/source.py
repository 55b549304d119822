"""From a path to weights and tokenizer, by what is there."""

from __future__ import annotations

from pathlib import Path

from kvstrata.errors import ModelError
from kvstrata.models.gguf import MAGIC
from kvstrata.models.gguf_source import GGUFSource
from kvstrata.models.hf_folder import PICKLES, HFFolder, pickle_refusal
from kvstrata.models.tokenizer import Tokenizer
from kvstrata.models.tokenizer_folder import tokenizer_from_folder
from kvstrata.models.tokenizer_gguf import tokenizer_from_gguf
from kvstrata.models.weights import WeightSource

# How torch.save begins: a zip archive, or a pickle of protocol 2 and later.
PICKLE_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def open_source(path: Path) -> WeightSource:
    """Open a GGUF file or a Hugging Face folder of safetensors. Raises ModelError naming what is wrong."""
    if path.is_dir():
        return HFFolder(path)
    if path.suffix in PICKLES:
        raise pickle_refusal(path)
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: give the folder that holds it and its config.json, not the file alone")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    if start != MAGIC and start.startswith(PICKLE_MAGICS):
        raise pickle_refusal(path)
    return GGUFSource(path)


def load_tokenizer(source: WeightSource, path: Path) -> Tokenizer:
    """The tokenizer that lies in the file, or in the folder, of an open source. Raises ModelError."""
    if isinstance(source, GGUFSource):
        return tokenizer_from_gguf(source.file.metadata)
    return tokenizer_from_folder(path)
