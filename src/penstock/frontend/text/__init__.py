"""Between text and token ids: chat template, lengths, detokenizing, stop strings."""
