"""Transport `nixl`: NVIDIA's NIXL, driven by one thread."""
