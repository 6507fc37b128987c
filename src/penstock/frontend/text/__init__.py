"""Text and token ids: chat templates, tokenizing, detokenizing, the internal answer, and the parser of what models write."""
