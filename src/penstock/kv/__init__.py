"""Floor 2: KV blocks, pools and prefix caches, blind to networks and engines."""
