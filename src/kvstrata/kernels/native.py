"""Finds, loads and selects the compiled kernels; without them everything runs on the torch reference."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cache

import torch

from kvstrata.errors import ConfigError

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512bf16")
_ENVIRONMENT = "KVSTRATA_KERNELS"


@cache
def backend() -> str:
    """Load the kernels once and tell which run: `avx512bf16`, `avx512`, `avx2`, `portable` or `reference`.

    The environment variable KVSTRATA_KERNELS forces one of them; unset or `auto` takes the widest that the
    machine supports. Warns once where the extension is missing or does not fit the installed torch.
    Raises ConfigError where the forced one is unknown or cannot run here.
    """
    wanted = os.environ.get(_ENVIRONMENT, "auto").strip().lower() or "auto"
    if wanted not in ("auto", "reference", *INSTRUCTION_SETS):
        raise ConfigError(
            f"{_ENVIRONMENT}={wanted!r} is not known: "
            f"use auto, reference or one of {', '.join(INSTRUCTION_SETS)}"
        )
    if wanted == "reference":
        return "reference"
    problem = _load()
    if problem is not None:
        if wanted != "auto":
            raise ConfigError(f"{_ENVIRONMENT}={wanted!r} needs the native kernels: {problem}")
        warnings.warn(
            f"kvstrata runs on its slow torch reference: {problem} (reinstall with a C++ compiler, "
            "`pip install --no-build-isolation`, for the native kernels)",
            RuntimeWarning,
            stacklevel=2,
        )
        return "reference"
    if wanted != "auto":
        try:
            torch.ops.kvstrata.use_instruction_set(wanted)
        except ValueError as error:
            raise ConfigError(f"{_ENVIRONMENT}={wanted!r} cannot run here: {_first_line(error)}") from error
    return str(torch.ops.kvstrata.instruction_set())


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MiB that it freed for what it allocates next.

    The activations of a prefill step are allocated and freed layer by layer; given back to the system each
    time they cost a page fault for every 4 KiB. Does nothing without the extension, or with another C library
    than glibc.
    """
    if backend() != "reference":
        torch.ops.kvstrata.keep_freed_memory()


def _load() -> str | None:
    """Load the extension; what is wrong with it, if anything."""
    spec = importlib.util.find_spec("kvstrata._native")
    if spec is None or spec.origin is None:
        return "the extension kvstrata._native was not built"
    try:
        torch.ops.load_library(spec.origin)  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"the extension does not load: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
