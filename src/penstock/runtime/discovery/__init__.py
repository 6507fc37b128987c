"""Who serves what, kept true by leases."""
