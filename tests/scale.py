"""The size of long checks: full under `make bench`, a tenth in `make test` and CI."""

import os

DEFAULT_SCALE = 0.1


def scale() -> float:
    """The share of their full size at which long checks run: KVSTRATA_SCALE, above 0 and at most 1."""
    text = os.environ.get("KVSTRATA_SCALE", str(DEFAULT_SCALE))
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError(f"KVSTRATA_SCALE is {text}: give a number above 0 and at most 1")
    return value


def scaled(full: int, least: int = 1) -> int:
    """`full` at today's scale, but never below `least`, the size under which the check proves nothing."""
    return max(least, round(full * scale()))
