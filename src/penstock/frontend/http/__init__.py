"""The HTTP surface: routes, connections, streams no faster than their clients read.

No logic of its own; `penstock.frontend.frontend` answers.
"""
