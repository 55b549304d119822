"""The GGUF reader: what it reads, and that a damaged file is a ModelError naming file and offset."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import gguf_name, tiny_gguf, weights

from kvstrata.errors import ModelError
from kvstrata.models.gguf import GGUFFile
from kvstrata.models.gguf_source import GGUFSource


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(tensors: int = 0, pairs: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return (
        string(name)
        + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, offset)
    )


def test_metadata_of_every_kind_is_read(tmp_path: Path) -> None:
    path = tiny_gguf(
        tmp_path / "tiny.gguf",
        a__flag=True,
        a__int=7,
        a__float=0.5,
        a__text="höhe",
        a__list=["x", "", "日本"],
        a__numbers=[3, -4],
    )
    file = GGUFFile.open(path)
    values = file.metadata
    assert file.version == 3
    assert (values["a.flag"], values["a.int"], values["a.float"], values["a.text"]) == (True, 7, 0.5, "höhe")
    assert values["a.list"] == ["x", "", "日本"]
    assert values["a.numbers"].tolist() == [3, -4]
    assert values["general.architecture"] == "llama"


def test_tensor_data_is_what_was_written(tmp_path: Path) -> None:
    tensors = weights(3)
    file = GGUFFile.open(tiny_gguf(tmp_path / "tiny.gguf", tensors=tensors))
    for name, data in tensors.items():
        entry = file.tensors[gguf_name(name)]
        assert entry.shape == data.shape
        assert entry.format == "F32"
        assert file.data(entry.name).shape == (data.shape[0] if data.ndim == 2 else 1, data.shape[-1] * 4)
        assert np.array_equal(file.data(entry.name).view(np.float32).reshape(data.shape), data)


def test_version_2_and_nested_arrays_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 5, 2) + struct.pack("<ii", 1, 2)
    path = tmp_path / "nested.gguf"
    path.write_bytes(header(pairs=1, version=2) + string(b"k") + struct.pack("<IIQ", 9, 9, 1) + inner)
    file = GGUFFile.open(path)
    assert file.version == 2
    assert [part.tolist() for part in file.metadata["k"]] == [[1, 2]]


def test_a_closed_file_says_so(tmp_path: Path) -> None:
    file = GGUFFile.open(tiny_gguf(tmp_path / "tiny.gguf"))
    view = file.data("output_norm.weight")
    before = view.copy()
    file.close()
    assert np.array_equal(view, before)  # a view that was handed out stays valid
    with pytest.raises(ModelError, match="closed"):
        file.data("output_norm.weight")


HUGE = 2**63
DEEP = struct.pack("<IQ", 9, 1) * 40
FAULTS = {
    "empty": (b"", "empty"),
    "magic": (header(magic=b"GGML"), "at byte 0: not a GGUF file"),
    "short magic": (b"GG", "at byte 0: not a GGUF file"),
    "version 1": (header(version=1), "at byte 4: version 1"),
    "version 4": (header(version=4), "at byte 4: version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "ends in header": (header()[:14], "at byte 8: the file ends inside its header"),
    "tensor count": (header(tensors=HUGE), "at byte 8: tensor count is"),
    "metadata count": (header(pairs=HUGE), "at byte 16: metadata count is"),
    "key length": (header(pairs=1) + struct.pack("<QIQ", HUGE, 0, 0), "at byte 24: length of metadata key"),
    "key utf-8": (header(pairs=1) + string(b"\xff\xfe") + b"\0" * 8, "at byte 32: metadata key is not UTF-8"),
    "duplicate key": (
        header(pairs=2) + (string(b"k") + struct.pack("<II", 4, 1)) * 2,
        "duplicate metadata key 'k'",
    ),
    "value type": (header(pairs=1) + string(b"k") + struct.pack("<IQ", 77, 0), "unknown type 77"),
    "item type": (header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 77, 0), "unknown type 77"),
    "number array": (header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 4, HUGE), "length of k is"),
    "string array": (header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 8, HUGE), "length of k is"),
    "string in array": (
        header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", HUGE),
        "at byte 57: a string of metadata 'k' ends past",
    ),
    "string in array utf-8": (
        header(pairs=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 1) + string(b"a\xff"),
        "at byte 58: a string of metadata 'k' is not UTF-8",
    ),
    "nesting": (header(pairs=1) + string(b"k") + struct.pack("<I", 9) + DEEP, "nests arrays"),
    "alignment": (
        header(pairs=1) + string(b"general.alignment") + struct.pack("<II", 4, 24),
        "general.alignment is 24",
    ),
    "dimensions": (header(1) + tensor(b"t", (2,) * 5), "at byte 24: tensor 't' has 5 dimensions"),
    "no dimension": (header(1) + tensor(b"t", ()) + b"\0" * 8, "has 0 dimensions"),
    "tensor type": (header(1) + tensor(b"t", (4,), kind=99), "'t' has unknown ggml type 99"),
    "removed type": (header(1) + tensor(b"t", (4,), kind=4), "'t' has unknown ggml type 4"),
    "part of a block": (header(1) + tensor(b"t", (33,), kind=8), "not whole Q8_0 blocks of 32"),
    "empty tensor": (header(1) + tensor(b"t", (0,)), "'t': shape"),
    "unaligned": (header(1) + tensor(b"t", (1,), offset=4) + b"\0" * 64, "not a multiple of 32"),
    "offset": (header(1) + tensor(b"t", (1,), offset=2**60), "past the end of the file"),
    "extent": (header(1) + tensor(b"t", (1000, 1000)), "at byte 96: tensor 't' ends at byte 4000096, past"),
    "shape overflow": (header(1) + tensor(b"t", (HUGE, HUGE)), "past the end of the file"),
    "duplicate tensor": (header(2) + tensor(b"t", (1,)) * 2 + b"\0" * 64, "duplicate tensor 't'"),
    "long name": (header(1) + tensor(b"n" * 70000, (1,)) + b"\0" * 64, "longer than 65535"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_names_file_and_offset(tmp_path: Path, fault: str) -> None:
    content, message = FAULTS[fault]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder_are_model_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelError, match="cannot be read"):
            GGUFFile.open(path)


def test_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    data_start = min(entry.offset for entry in GGUFFile.open(tmp_path / "tiny.gguf").tensors.values())
    cuts = {*range(0, data_start, 7), *range(data_start, len(content) - 32, 997), len(content) - 33}
    path = tmp_path / "cut.gguf"
    for cut in sorted(cuts):
        path.write_bytes(content[:cut])
        with pytest.raises(ModelError, match=re.escape(str(path))):
            GGUFFile.open(path)


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    factors = {"rope_freqs.weight": np.ones(4, np.float32)}
    tiny_gguf(folder / "good.gguf", extra=factors, a__texts=["x", "yy"], a__numbers=[1, 2], a__flag=True)
    return folder


@settings(max_examples=300, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, 2499), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.none() | st.integers(0, 4000),
)
def test_damaged_header_is_a_model_error_or_harmless(
    fuzz_folder: Path, flips: list[tuple[int, int]], cut: int | None
) -> None:
    content = bytearray((fuzz_folder / "good.gguf").read_bytes())
    for position, value in flips:
        content[position] = value
    path = fuzz_folder / "bad.gguf"
    path.write_bytes(content[:cut])
    message = str(path)
    try:
        source = GGUFSource(path)
        assert all(source.raw(name).data.nbytes > 0 for name in source.names())
    except ModelError as error:
        message = str(error)
    assert message.startswith(str(path))
    assert len(message) < 2000


def test_real_files_open(smollm2_path: Path, gemma_path: Path) -> None:
    smollm2, gemma = GGUFFile.open(smollm2_path), GGUFFile.open(gemma_path)
    assert len(smollm2.tensors) == 272
    assert len(smollm2.metadata["tokenizer.ggml.merges"]) == 48900
    assert len(gemma.metadata["tokenizer.ggml.tokens"]) == 262144
    assert gemma.metadata["tokenizer.ggml.scores"].dtype == np.float32
