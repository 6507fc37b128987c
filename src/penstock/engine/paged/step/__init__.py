"""One step on the device: its arrays, its attention, its sampled tokens."""
