"""The host tier: KV blocks in the memory of the worker's machine."""
