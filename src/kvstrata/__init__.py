"""kvstrata: a KV-cache engine for transformer inference."""
