"""Identifiers: distinct types over plain ints and strings, so that mixing them is a type error."""

import secrets
from typing import NewType

BlockId = NewType("BlockId", int)  # index into one tier's pool
WorkerId = NewType("WorkerId", int)  # one incarnation of a worker: a restarted worker gets a new one
RequestId = NewType("RequestId", str)  # one choice of one user request
PinId = NewType("PinId", int)  # KV blocks held for a reader

_WORKER_ID_BITS = 62
"""A worker's; ids of its further data-parallel ranks have the 63rd bit."""


def new_worker_id() -> WorkerId:
    """Give a random id, so that supervisors of many hosts need not agree on numbers."""
    return WorkerId(secrets.randbits(_WORKER_ID_BITS) or 1)
