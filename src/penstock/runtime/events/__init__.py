"""KV events from a worker to whoever routes: replay ring, snapshot, gap detection."""
