"""vLLM's API of tokens: `/tokenize` and `/detokenize`."""
