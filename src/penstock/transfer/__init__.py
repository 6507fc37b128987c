"""Floor 2."""
