"""HTTP in front of an engine: the field's endpoints, keys and limits, life and death of the process."""
