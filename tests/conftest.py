"""Fixtures that several folders of tests use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstrata.errors import ModelError
from kvstrata.models.locate import default_model, gemma_model

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, a Q4_1 GGUF."""
    try:
        return default_model()
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """The second model, a Q4_K_M GGUF with sliding-window layers."""
    try:
        return gemma_model()
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Third-party texts, traces and configurations that lie beside the repository on some machines."""
    shared = Path(os.environ.get("KVSTRATA_SHARED", REPOSITORY.parent / "shared"))
    if not (shared / "data").is_dir():
        pytest.skip(f"no folder {shared / 'data'}: it is not part of the repository")
    return shared
