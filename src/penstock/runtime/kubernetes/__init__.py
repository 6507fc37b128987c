"""The Kubernetes API: who this process is there, the calls, and a watch that survives what API servers do."""
