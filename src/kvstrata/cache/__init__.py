"""The cache: keys, pool, tables, prefix index, policies, retention, formats, sizing. No I/O, no model."""
