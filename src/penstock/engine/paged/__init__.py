"""A paged engine on unmodified transformers models."""
