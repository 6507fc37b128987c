"""Text that starts a graph elsewhere: objects of Kubernetes, or a Slurm script.

Both start `penstock up` with the graph and the part of it that a pod or node runs. Nothing here starts or asks anything.
"""
