"""Floor 4: engines with one shared scheduler: mock (timing only) and paged (PyTorch)."""
