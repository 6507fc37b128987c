"""One part at a time, in this process: hashing, block pool, resharding plans, prefix index."""
