"""All workers: who is listed, connected, and may get a request now."""
