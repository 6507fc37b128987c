"""Floor 3: KV blocks, pools and prefix caches, independent of networks and engines."""
