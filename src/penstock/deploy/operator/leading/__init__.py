"""Which operator of several acts: one of its own namespace by a Lease there, one of all namespaces by a claim where it operates."""
