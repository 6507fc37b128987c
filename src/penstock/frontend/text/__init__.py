"""Text and token ids: chat templates, length bounds, detokenizing, stop strings."""
