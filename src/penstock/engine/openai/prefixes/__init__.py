"""Another region's prefix summaries: kept by router process, and passed on as KV events of the link."""
