"""Transport `cuda`: device memory, by NVIDIA's driver."""
