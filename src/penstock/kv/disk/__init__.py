"""KV blocks on disks and networked file systems: a file of fixed slots, and a file with a record of each slot."""
