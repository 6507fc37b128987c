"""Transport `shm`: processes of one host, by shared arenas or by way of the kernel."""
