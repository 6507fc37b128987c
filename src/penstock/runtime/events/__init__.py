"""KV events from workers to routers: replay ring, snapshots, gap detection."""
