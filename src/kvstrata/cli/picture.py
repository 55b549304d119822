"""Pictures that commands draw: where they may go, and what draws them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from kvstrata.errors import ConfigError

_SUFFIXES = (".png", ".svg", ".pdf")
# Told apart by colour-blind readers too (Okabe and Ito, Color Universal Design, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def check_plot(path: Path) -> None:
    """Raise ConfigError, before anything is measured, where the picture could not be drawn or written."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot is {str(path)!r}; give a file ending in {', '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot is {str(path)!r}, in a folder that does not exist")
    figure_module()


def figure_module() -> Any:
    """matplotlib.figure, which is an extra. Raises ConfigError where it is not installed."""
    try:
        return import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'kvstrata[plot]'") from None
