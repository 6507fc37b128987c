"""HTTP: routes, connections, and streams with backpressure from their clients. The logic is in `penstock.frontend.frontend`."""
