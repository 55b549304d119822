"""Angles of rotary position embeddings, with the scalings that stretch them past the trained length.

Angles are computed in float64 and only their cosines and sines are rounded to float32. At position 2^30 a
float64 angle is right to 2^-22, and cosine and sine take its whole turns off without further loss.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor

from kvstrata.models.config import RopeConfig

_GROW = 1024  # positions; tables grow in steps of this many
_TABLED = 8192  # positions from here on have pages, so that an endless stream takes no more memory
_PAGE = 64  # positions
_KEPT_PAGES = 128


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each pair of a head, float64 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = _scaled(1.0 / config.theta**exponents, config, head_dim)
    if config.freq_factors is None:
        return frequencies
    return frequencies / torch.tensor(config.freq_factors, dtype=torch.float64)


def _scaled(frequencies: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    if config.kind == "yarn":
        return _yarn(frequencies, config, head_dim)
    return frequencies


def magnitude(config: RopeConfig) -> float:
    """What cosines and sines are multiplied by: 1, or yarn's attention factor (arXiv 2309.00071, 3.4)."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    waves = config.original_max_position * frequencies / (2 * math.pi)  # turns within the trained length
    kept = (waves - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / config.factor)


def _yarn(frequencies: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """NTK by parts (arXiv 2309.00071, section 3.2): a linear ramp over dimensions from kept to stretched."""

    def dimension(turns: float) -> float:
        span = config.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (1.0 - ramp) + frequencies / config.factor * ramp


Rotation = tuple[Tensor, Tensor]


class RopeTable:
    """Cosines and sines by position: a table that grows to the positions asked for, and pages after its end.

    A page is always computed whole, so that a position has the same bits whatever is asked for beside it.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config, head_dim)
        self._magnitude = magnitude(config)
        self._device = device
        self._pages: OrderedDict[int, Rotation] = OrderedDict()
        self._grow(0)

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 `[num_tokens, head_dim / 2]`, of int64 `positions`, all below `end`."""
        if min(end, _TABLED) > len(self._cos):
            self._grow(min(end, _TABLED))
        if end <= _TABLED:
            return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        numbers, which = torch.unique(positions // _PAGE, return_inverse=True)
        pages = [self._page(number) for number in numbers.tolist()]
        rows = which * _PAGE + positions % _PAGE
        cos, sin = (torch.cat(part).index_select(0, rows) for part in zip(*pages, strict=True))
        return cos, sin

    def _page(self, number: int) -> Rotation:
        begin = number * _PAGE
        if begin < _TABLED:
            return self._cos[begin : begin + _PAGE], self._sin[begin : begin + _PAGE]
        if number in self._pages:
            self._pages.move_to_end(number)
        else:
            self._pages[number] = self._rotation(begin, begin + _PAGE)
            if len(self._pages) > _KEPT_PAGES:
                self._pages.popitem(last=False)
        return self._pages[number]

    def _grow(self, end: int) -> None:
        self._cos, self._sin = self._rotation(0, -(-end // _GROW) * _GROW)

    def _rotation(self, begin: int, end: int) -> Rotation:
        positions = torch.arange(begin, end, dtype=torch.float64)
        angles = torch.outer(positions, self._frequencies)
        cos = (angles.cos() * self._magnitude).to(self._device, torch.float32)
        return cos, (angles.sin() * self._magnitude).to(self._device, torch.float32)
