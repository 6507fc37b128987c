"""Model shapes, hardware and parallelism: the inputs of latency models."""
