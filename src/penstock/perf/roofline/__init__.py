"""The roofline: latency from bytes and FLOPs over the hardware's bandwidth and peak."""
