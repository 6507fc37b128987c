"""Data-parallel ranks as workers: a registration of N ranks is N routing targets `NAME/0` to `NAME/N-1` of one address."""

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from penstock.core.ids import WorkerId
from penstock.core.types.instances import Instance


class Ranks:
    """The targets of each registration. One event loop owns it.

    Each target has a slot, a connection, an index entry and loads of its own, like a worker. A registration comes, changes
    and goes with all its targets.
    """

    def __init__(self) -> None:
        """Know no registration."""
        self._ids: dict[WorkerId, tuple[WorkerId, ...]] = {}  # by each target's id

    def put(self, instance: Instance) -> Sequence[Instance]:
        """Take a registration, and give its targets: itself where its engine has one rank."""
        targets = targets_of(instance)
        ids = tuple(target.worker_id for target in targets)
        for worker_id in ids:
            self._ids[worker_id] = ids
        return targets

    def remove(self, worker_id: WorkerId) -> Sequence[WorkerId]:
        """Forget a registration, and give the ids of its targets."""
        ids = self._ids.get(worker_id, (worker_id,))
        for each in ids:
            self._ids.pop(each, None)
        return ids

    def beside(self, worker_ids: Iterable[WorkerId]) -> set[WorkerId]:
        """Give these targets and all others of their registrations."""
        return {each for worker_id in worker_ids for each in self._ids.get(worker_id, (worker_id,))}


def targets_of(instance: Instance) -> tuple[Instance, ...]:
    """Make a registration's targets.

    Prices are of the whole engine, over whose ranks sequences spread: a rank's sequence costs as much as one on each rank.
    """
    count, prices = instance.engine.data_parallel, instance.prices
    if count <= 1:
        return (instance,)
    if prices is not None:
        prices = msgspec.structs.replace(
            prices,
            decode_sequence_s=count * prices.decode_sequence_s,
            decode_token_s=count * prices.decode_token_s,
        )
    return tuple(
        msgspec.structs.replace(
            instance,
            worker_id=_id_of(instance.worker_id, rank),
            name=f"{instance.name}/{rank}",
            prices=prices,
            rank=rank,
            registered_id=instance.worker_id,
        )
        for rank in range(count)
    )


def _id_of(worker_id: WorkerId, rank: int) -> WorkerId:
    """Give a rank's id: that of the registration for rank 0, else one with bit 62 set, equal in all routers."""
    if not rank:
        return worker_id
    digest = hashlib.blake2b(f"{worker_id}/{rank}".encode(), digest_size=8).digest()
    return WorkerId(int.from_bytes(digest, "little") >> 2 | 1 << 62)
