"""The `kvstrata` command: one file a command."""
