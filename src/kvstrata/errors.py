"""The errors that kvstrata raises on purpose; anything else is a defect of ours."""

from __future__ import annotations


class KVStrataError(Exception):
    """Base of every error that a user can cause and mend.

    The message is one line that tells the field, the value it had and what would be right, so that the
    command line and the server can show it as it is.
    """


class ConfigError(KVStrataError, ValueError):
    """A setting, a sampling parameter or a tier URL that cannot be used as given."""


class ModelError(KVStrataError):
    """A model file or folder that is missing, damaged, or of a kind that is not supported."""


class RequestError(KVStrataError, ValueError):
    """A request that can never be served as given (empty, too long for the model or for the pool)."""


class IntegrityError(KVStrataError):
    """An invariant of the cache does not hold: a defect of ours, raised by `check_integrity`."""


class OverloadedError(KVStrataError):
    """More requests than may wait at once; the same request can succeed later."""


class StoppedError(KVStrataError):
    """The engine does not serve (any more): it is shutting down, or it has failed."""
