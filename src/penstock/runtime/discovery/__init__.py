"""Discovery: a registry of workers with leases."""
