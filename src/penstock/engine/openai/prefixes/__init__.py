"""What another region tells of the prefixes that it holds: kept by router's process, and passed on as KV events of the link."""
