"""Discovery by etcd v3: instances as keys with a lease, watched."""
