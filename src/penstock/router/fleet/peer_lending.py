"""Which worker lends the beginning of a prompt to the one that is to compute it, and what that costs."""

import asyncio
import math

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.kv.exchange import KvPeer
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.worker_pool import WorkerPool
from penstock.router.links.peer_prices import PeerLoads, with_peers
from penstock.seams import RoutingContext


class PeerLending:
    """One router's loads of cached KV between workers. One event loop owns it."""

    def __init__(self, fleet: Fleet) -> None:
        """Know of no load under way."""
        self._fleet = fleet
        self._lent_until_s: dict[int, float] = {}  # by slot, at most one each

    def priced(
        self, pool: WorkerPool, context: RoutingContext, prefill_mask: NDArray[np.bool_] | None
    ) -> PeerLoads | None:
        """Price what each worker that may compute a prompt could load from others.

        Args:
            pool: of the request's model.
            context: of the request.
            prefill_mask: (num_slots,) bool, prefill workers that may get the prompt; None for none.

        Returns:
            None where nothing is worth it.
        """
        if not np.count_nonzero(context.overlap_blocks):
            return None  # nobody has anything of it
        readers = context.eligible if prefill_mask is None else context.eligible | prefill_mask
        fleet = self._fleet
        engine = fleet.slots.at(int(readers.argmax())).instance.engine  # all have blocks of one size
        byte_s = fleet.link_bandwidths.measured_byte_s
        return with_peers(
            context, pool.pairs, byte_s, engine.kv_bytes_per_block, self._lent_for_s, readers=readers
        )

    def lender(
        self, model: str, context: RoutingContext, slot: int, sources: NDArray[np.intp] | None
    ) -> KvPeer | None:
        """Name another worker that has more of a prompt, on its device or in its host tier, than the one that is to compute it.

        That is the one that was priced, or else the one that has most: its speed is measured then.

        Args:
            model: of the request.
            context: in which the worker was chosen.
            slot: of that worker.
            sources: as in `PeerLoads`; None where nothing was priced.
        """
        if not np.count_nonzero(context.overlap_blocks):
            return None
        fleet, (device, host, *_) = self._fleet, context.tier_blocks
        lent = fleet.pools[model].pairs.lent(slot, device, host)
        source = -1 if sources is None else int(sources[slot])
        if source < 0:
            source = int(lent.argmax())
            if lent[source] <= context.overlap_blocks[slot]:
                return None
        member = fleet.slots.at(source)
        byte_s = float(fleet.link_bandwidths.measured_byte_s(source)[slot])
        block_s = byte_s * member.instance.engine.kv_bytes_per_block if math.isfinite(byte_s) else 0.0
        lent_s = self._lent_for_s(source) + block_s * int(lent[source] - device[slot])
        self._lent_until_s[source] = asyncio.get_running_loop().time() + lent_s
        return KvPeer(
            worker_id=member.worker_id, num_blocks=int(lent[source]), source=member.kv_source, block_s=block_s
        )

    def _lent_for_s(self, source: int) -> float:
        return max(self._lent_until_s.get(source, 0.0) - asyncio.get_running_loop().time(), 0.0)
