"""Floor 3: engines behind one batched seam: mock (timing) and paged (PyTorch)."""
