"""All workers: which are listed, connected, and ready for requests."""
