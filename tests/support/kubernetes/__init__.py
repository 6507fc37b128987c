"""A Kubernetes API server for tests, on the test's own event loop, and controllers that play a cluster."""
