"""KV blocks in object stores: immutable packs of several blocks, which many writers share."""
