"""Counts of blocks and packs."""

from dataclasses import dataclass


@dataclass(slots=True)
class PackCounts:
    """Totals since the store was opened.

    Attributes:
        loaded: blocks that were loaded and verified.
        stored: blocks that were put, or that another writer had put before.
        mismatched: blocks that had other bytes than were written, and were dropped.
        refused: blocks that were not stored, since too many were waiting.
        packs_gone: packs that were deleted, by another writer for example, before they were read.
        packs_refused: objects that are no packs of this namespace.
        packs_deleted: by `collect`.
        refreshes_failed: lists that failed.
    """

    loaded: int = 0
    stored: int = 0
    mismatched: int = 0
    refused: int = 0
    packs_gone: int = 0
    packs_refused: int = 0
    packs_deleted: int = 0
    refreshes_failed: int = 0
