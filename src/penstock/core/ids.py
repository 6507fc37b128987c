"""Identifiers: distinct types over plain ints and strings, so that mixing them is a type error."""

from typing import NewType

BlockId = NewType("BlockId", int)  # index into one tier's pool
WorkerId = NewType("WorkerId", int)  # one incarnation of a worker: a restarted worker gets a new one
RequestId = NewType("RequestId", str)  # one choice of one user request
PinId = NewType("PinId", int)  # KV blocks held for a reader
