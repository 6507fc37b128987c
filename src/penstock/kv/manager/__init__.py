"""The KV manager: loads prefixes from the tiers below the device, and offloads to them what the device may evict."""
