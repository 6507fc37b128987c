"""Transport `shm`: processes of one host, by shared arenas or by the kernel."""
