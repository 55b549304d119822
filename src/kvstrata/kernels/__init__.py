"""Operators under `torch.ops.kvstrata`; `reference` is their specification in plain torch."""
