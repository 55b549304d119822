"""From a file to a callable decoder: readers, tokenizers and one config-driven decoder."""
