"""Another region as a worker: its frontends by HTTP, with connections that are kept, and streams that move from one to another.

A region is another deployment of Penstock, whose router chooses the worker.
"""
