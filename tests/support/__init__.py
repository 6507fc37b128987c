"""Shared by several tests: manually stepped engines, clusters, scenes, tokenizers, checkpoints."""
