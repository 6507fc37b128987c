"""Prices from first principles: bytes and FLOPs over what the hardware can do."""
