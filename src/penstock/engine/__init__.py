"""Floor 3: engines with one shared scheduler: mock (timing only) and paged (PyTorch)."""
