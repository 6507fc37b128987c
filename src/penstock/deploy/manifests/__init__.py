"""What starts a graph elsewhere: objects of Kubernetes, a Helm chart, a compose file, a Slurm script.

All start `penstock up` with the graph and the part of it that a pod, container or node runs. Nothing here starts or asks anything.
"""
