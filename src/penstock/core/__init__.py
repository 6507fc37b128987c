"""Floor 0: ids, messages, hashing, errors, configuration base, logging."""
