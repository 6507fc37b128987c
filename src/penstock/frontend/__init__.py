"""Floor 5: OpenAI-compatible HTTP: decode, preprocess, stream back."""
