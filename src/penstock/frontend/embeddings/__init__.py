"""Embeddings: the bodies of `/v1/embeddings`."""
