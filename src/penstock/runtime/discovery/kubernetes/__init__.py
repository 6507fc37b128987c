"""Discovery by Kubernetes: a Lease for each worker, owned by its pod."""
