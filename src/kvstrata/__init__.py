"""kvstrata: a KV-cache engine for transformer inference."""

__version__ = "0.1.0"
