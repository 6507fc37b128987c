"""KV blocks on disks and networked file systems: a file of fixed slots with a record for each."""
