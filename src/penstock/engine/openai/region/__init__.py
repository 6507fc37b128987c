"""Another region as a worker: its frontends over kept HTTP connections, and streams that move between its frontends.

A region is another deployment of Penstock, whose router chooses the worker.
"""
