"""vLLM as an engine: its engine core in processes of its own, driven step by step without its detokenizer."""
