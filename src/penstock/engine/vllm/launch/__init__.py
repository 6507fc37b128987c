"""What a spec says in vLLM's words, and vLLM's processes started with it."""
