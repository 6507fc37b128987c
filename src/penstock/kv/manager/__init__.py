"""The KV manager: loads prefixes from tiers below the device, and offloads what the device may give up."""
