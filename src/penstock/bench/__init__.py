"""Floor 9: what `penstock bench` runs; every bench writes one JSON of one schema."""
