"""KV tiers on real processes: a host tier, disks across restarts, an object store shared by workers."""
