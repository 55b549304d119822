"""A path becomes a source by what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny_gguf

from kvstrata.errors import ModelError
from kvstrata.models.gguf_source import GGUFSource
from kvstrata.models.source import open_source


def test_gguf_is_known_by_its_content(tmp_path: Path) -> None:
    assert isinstance(open_source(tiny_gguf(tmp_path / "no_suffix")), GGUFSource)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    text = tmp_path / "model.txt"
    text.write_text("hello")
    with pytest.raises(ModelError, match=r"model\.txt: at byte 0: not a GGUF file"):
        open_source(text)
    with pytest.raises(ModelError, match="give the folder"):
        open_source(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        open_source(tmp_path / "absent.gguf")
