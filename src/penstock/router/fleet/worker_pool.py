"""A model's workers, and which of them may get a request now.

Workers of one model may have different cards, as while a new version rolls out. Workers with other block hashes must not
share requests: one card is the canonical model card, and a worker that differs waits until the others are gone.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import CardFile, Instance, InstanceState, ModelCard, Role
from penstock.core.types.load import ModelLoad
from penstock.core.types.requests import Request
from penstock.core.wire import PackedHashes
from penstock.perf.topology import NetworkPath
from penstock.router.fleet.links import KvTransferPairs
from penstock.router.fleet.loads import LoadTracker
from penstock.router.fleet.member import FleetMember, identity
from penstock.router.fleet.prices import PriceTable, Traffic

_log = get_logger()


class Adapters:
    """Holders of each adapter by worker slot. Further adapters than `adapters_max` are left out. One event loop owns it."""

    def __init__(self, num_slots: int, adapters_max: int) -> None:
        """Know no adapter."""
        self._num_slots = num_slots
        self._adapters_max = adapters_max
        self._holders: dict[str, NDArray[np.bool_]] = {}
        self._by_slot: dict[int, tuple[str, ...]] = {}
        self._ready_holders: Counter[str] = Counter()  # no zeros
        self._cards: tuple[ModelCard, Mapping[str, ModelCard]] | None = (
            None  # None once `_ready_holders` changed
        )

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._holders

    def put(self, slot: int, instance: Instance, *, is_ready: bool) -> None:
        """Take the adapters of the worker in a slot, in place of what the slot had."""
        self.remove(slot, is_ready=is_ready)
        known: list[str] = []
        for adapter in instance.adapters:
            holders = self._holders.get(adapter)
            if holders is None:
                if len(self._holders) >= self._adapters_max:
                    _log.warning(
                        "adapter_left_out",
                        adapter=adapter,
                        worker=instance.name,
                        adapters_max=self._adapters_max,
                    )
                    continue
                holders = self._holders[adapter] = np.zeros(self._num_slots, dtype=np.bool_)
            holders[slot] = True
            known.append(adapter)
        self._by_slot[slot] = tuple(known)
        if is_ready:
            self.count_ready(slot, +1)

    def remove(self, slot: int, *, is_ready: bool) -> None:
        """Forget the adapters of the worker in a slot."""
        if is_ready:
            self.count_ready(slot, -1)
        for adapter in self._by_slot.pop(slot, ()):
            holders = self._holders[adapter]
            holders[slot] = False
            if not holders.any():
                del self._holders[adapter]

    def count_ready(self, slot: int, change: int) -> None:
        """Count a worker that is ready from now on (1), or no longer (-1)."""
        for adapter in self._by_slot.get(slot, ()):
            before = self._ready_holders[adapter]
            self._ready_holders[adapter] += change
            if not self._ready_holders[adapter]:
                del self._ready_holders[adapter]  # adapters come and go as long as the process lives
            if not before or before + change == 0:
                self._cards = None

    def among(self, ready: NDArray[np.bool_], adapter: str) -> NDArray[np.bool_]:
        """Mask (num_slots,) the holders of an adapter among `ready`, in an array of its own."""
        holders = self._holders.get(adapter)
        return np.zeros_like(ready) if holders is None else ready & holders

    def cards(self, card: ModelCard) -> Mapping[str, ModelCard]:
        """Give the card of each adapter with a ready holder, by name; the same object until that changes."""
        if self._cards is None or self._cards[0] is not card:
            self._cards = card, {adapter: card.adapted(adapter) for adapter in self._ready_holders}
        return self._cards[1]

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        more = (0, num_slots - self._num_slots)
        self._num_slots = num_slots
        self._holders = {adapter: np.pad(holders, more) for adapter, holders in self._holders.items()}

    def check(self, ready: NDArray[np.bool_], listed: Mapping[int, tuple[str, ...]]) -> None:
        """Raise AssertionError where counts disagree with ready workers, or with the adapters that workers list, by slot."""
        counts = {adapter: int((holders & ready).sum()) for adapter, holders in self._holders.items()}
        assert {adapter: count for adapter, count in counts.items() if count} == self._ready_holders, (
            "adapters: ready holders are counted"
        )
        assert len(self._holders) <= self._adapters_max, f"{len(self._holders)} adapters: past the bound"
        for adapter, holders in self._holders.items():
            expected = {slot for slot, adapters in listed.items() if adapter in adapters}
            slots = set(np.flatnonzero(holders).tolist())
            assert slots, f"adapter {adapter}: no holder"
            # a worker that came past the bound is no holder until it is put again
            assert slots <= expected, f"adapter {adapter}: {slots} are said to have it, {expected} have"


_FORMER_MAX = 4
"""Former canonical cards whose requests are recognized; a request waits for minutes at most."""
_Vote = tuple[ModelCard, bool]
"""A member's card, and whether it stays. A draining member, or another deployment, counts only while no member stays."""


class ModelPool:
    """The workers of one model. A change costs O(1), except where another card becomes canonical. One event loop owns it.

    card:          the canonical model card
    ready:         (num_slots,) bool, workers that may get requests; read-only
    ready_prefill: (num_slots,) bool, prefill workers that may get prompts; read-only
    """

    def __init__(self, first: FleetMember, num_slots: int, adapters_max: int) -> None:
        """Make a pool with the card of its first worker, which has yet to be `put`; it knows so many adapters."""
        self.card = first.instance.card
        self._former: deque[ModelCard] = deque(maxlen=_FORMER_MAX)
        self.adapters = Adapters(num_slots, adapters_max)
        self.pairs = KvTransferPairs()
        self.prices = PriceTable(num_slots)
        self.traffic = Traffic()
        self._show(np.zeros((2, num_slots), dtype=np.bool_))
        self._roles: dict[int, Role] = {}  # by slot
        self._deployments: set[int] = set()  # slots
        self._votes: dict[FleetMember, _Vote] = {}
        self._counts: Counter[_Vote] = Counter()  # no zeros
        self._num_staying = 0
        self._unanswered_since_s: float | None = None

    def __len__(self) -> int:
        return len(self._votes)

    def put(self, member: FleetMember, path: NetworkPath | None = None) -> Sequence[FleetMember]:
        """Take in a worker, or what discovery says anew about one.

        Args:
            member: the worker.
            path: the network path from this router; None costs nothing.

        Returns:
            Members whose `matching` may have changed.
        """
        instance, slot = member.instance, member.slot
        if self._roles.get(slot) is not instance.role:
            self.set_ready(slot, is_ready=False)
            self._roles[slot] = instance.role
        is_elsewhere = instance.engine.is_deployment
        (self._deployments.add if is_elsewhere else self._deployments.discard)(slot)
        self.adapters.put(slot, instance, is_ready=bool(self.ready[slot]))
        self.pairs.put(slot, instance)
        self.prices.put(slot, instance, path)
        if member in self._votes:
            self._count(self._votes[member], -1)
        stays = member.listed and instance.state is InstanceState.READY and not is_elsewhere
        self._votes[member] = instance.card, stays
        self._count(self._votes[member], +1)
        member.matching = self._matches(member)
        return self._keep_canonical() or (member,)

    def remove(self, member: FleetMember) -> Sequence[FleetMember]:
        """Let a worker go.

        Returns:
            The other members whose `matching` may have changed.
        """
        slot = member.slot
        self._count(self._votes.pop(member), -1)
        self.set_ready(slot, is_ready=False)
        self.adapters.remove(slot, is_ready=False)
        del self._roles[slot]
        self._deployments.discard(slot)
        self.pairs.remove(slot)
        self.prices.remove(slot)
        return self._keep_canonical()

    def choose_canonical(self) -> Sequence[FleetMember]:
        """Take the card of most workers that answer and stay; for a first look at all of them.

        Returns:
            Members whose `matching` may have changed.
        """
        staying = self._staying()
        answering = [member for member in staying if member.instance.role is not Role.PREFILL] or staying
        ((most, _),) = Counter(member.identity for member in answering).most_common(1)
        if most == identity(self.card):
            return ()
        return self._make_canonical(next(member for member in answering if member.identity == most))

    def choose_canonical_if_unanswered(self, now_s: float, patience_s: float) -> Sequence[FleetMember]:
        """Choose the card anew where no worker has been ready to answer for `patience_s`; called now and then.

        Example: of one version only prefill workers are left.

        Returns:
            Members whose `matching` may have changed.
        """
        if self.has_ready:
            self._unanswered_since_s = None
        elif self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        elif now_s - self._unanswered_since_s >= patience_s:
            return self.choose_canonical()
        return ()

    def renewed(self, request: Request) -> Request:
        """Give a request for the canonical card: one that was prepared for a former card loses its block hashes and gets the salt.

        With the former salt it would find, and leave, KV of other weights under the same names.

        Raises:
            Unavailable: the former card has another tokenizer or chat template, so its tokens are not this model's.
        """
        if _is_of(request, self.card):
            return request
        former = next((card for card in self._former if _is_of(request, card)), None)
        if former is None:
            return request  # of a frontend that makes salts of its own, as `penstock router` does
        if _text_of(former) != _text_of(self.card):
            raise Unavailable(
                f"model {request.model} was replaced by one with another tokenizer or chat template while this request"
                " waited; send it again",
                retry_after_s=1.0,
            )
        salt = self.card.salt + request.salt[len(former.salt) :]
        return msgspec.structs.replace(request, salt=salt, block_hashes=PackedHashes(b""))

    @property
    def has_ready(self) -> bool:
        """Whether any worker may get requests."""
        return bool(np.count_nonzero(self.ready))  # 0.2 us, where any() takes 2

    @property
    def has_ready_prefill(self) -> bool:
        """Whether any prefill worker may get prompts."""
        return bool(np.count_nonzero(self.ready_prefill))

    def within_reach(self, request: Request, ready: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Leave other deployments out of some ready workers where the request has to stay, or has what does not cross."""
        sampling = request.sampling
        stays = (
            request.is_forwarded
            or request.embeds
            or request.media is not None
            or sampling.prompt_logprobs is not None
            or bool(sampling.bad_words)
        )
        return self.workers_only(ready) if stays else ready

    def workers_only(self, ready: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Leave other deployments out of some ready workers."""
        if not self._deployments:
            return ready
        ready = ready.copy()
        ready[list(self._deployments)] = False
        return ready

    def load(self, loads: LoadTracker) -> ModelLoad:
        """Sum the loads of the workers that may get requests now, the router's own requests included."""
        ready = self.workers_only(self.ready)
        any_role = ready | self.ready_prefill
        return ModelLoad(
            workers=int(np.count_nonzero(ready)),
            block_size=self.card.block_size,
            running_requests=int(loads.running_requests[ready].sum()),
            waiting_requests=int(loads.waiting_requests[any_role].sum()),
            queued_prefill_tokens=int(loads.queued_prefill_tokens[any_role].sum()),
            context_tokens=int(loads.context_tokens[ready].sum()),
            active_blocks=int(loads.active_blocks[ready].sum()),
            total_blocks=int(loads.total_blocks[ready].sum()),
        )

    @property
    def has_deployments(self) -> bool:
        """Whether some of its workers are other deployments."""
        return bool(self._deployments)

    @property
    def deployments(self) -> Collection[int]:
        """Slots of workers that are other deployments."""
        return self._deployments

    def mismatch(self, member: FleetMember) -> str | None:
        """Say why a worker's card does not match the canonical one; None where it does."""
        if member.matching:
            return None
        card, ours = member.instance.card, self.card
        if card.block_size != ours.block_size:
            what = f"blocks of {card.block_size} tokens, the model's other workers have {ours.block_size}"
        else:
            files = sorted({file.name for file in {*card.files} ^ {*ours.files}})
            other = f"other {', '.join(files)}" if files else "other weights, number formats or engine"
            what = f"{_named(card)}, the model's other workers have {_named(ours)}: {other}"
        return f"{what}; it is used once these are gone"

    def set_ready(self, slot: int, *, is_ready: bool) -> None:
        """Say whether a worker may get requests, or a prefill worker prompts."""
        is_prefill = self._roles.get(slot) is Role.PREFILL
        if bool(self._ready[int(is_prefill), slot]) is not is_ready:
            self._ready[int(is_prefill), slot] = is_ready
            if not is_prefill:
                self.adapters.count_ready(slot, +1 if is_ready else -1)

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        self._show(np.pad(self._ready, ((0, 0), (0, num_slots - len(self.ready)))))
        self.adapters.grow(num_slots)
        self.prices.grow(num_slots)

    def check(self) -> None:
        """Raise AssertionError where counts and members disagree."""
        self.pairs.check()
        self.prices.check()
        self.traffic.check()
        for slot in np.flatnonzero(self.ready | self.ready_prefill).tolist():
            is_prefill = self._roles[slot] is Role.PREFILL
            assert is_prefill == bool(self.ready_prefill[slot]) != bool(self.ready[slot]), (
                f"slot {slot}: its role"
            )
        self.adapters.check(self.ready, {m.slot: m.instance.adapters for m in self._votes})
        assert Counter(self._votes.values()) == self._counts, f"cards: {self._counts} for {self._votes}"
        assert self._num_staying == sum(stays for _, stays in self._votes.values()), "how many stay"
        assert not self._votes or self._is_held(self.card), "the canonical card is a member's"
        for member in self._votes:
            assert member.matching == self._matches(member), f"{member.instance.name}: matches"

    def _show(self, ready: NDArray[np.bool_]) -> None:
        self._ready = ready
        self.ready, self.ready_prefill = ready.view()
        self.ready.flags.writeable = self.ready_prefill.flags.writeable = False

    def _count(self, vote: _Vote, change: int) -> None:
        self._counts[vote] += change
        if not self._counts[vote]:
            del self._counts[vote]  # cards come and go as long as the process lives
        self._num_staying += change * vote[1]

    def _is_held(self, card: ModelCard) -> bool:
        """Say whether a member that counts has this card."""
        return (card, self._num_staying > 0) in self._counts

    def _staying(self) -> list[FleetMember]:
        return [member for member, (_, stays) in self._votes.items() if stays] or [*self._votes]

    def _keep_canonical(self) -> Sequence[FleetMember]:
        """Take another card where no member that counts has the canonical one; prefer one with the same block hashes."""
        if self._is_held(self.card) or not self._votes:
            return ()
        staying = self._staying()
        for member in staying:
            if member.identity == identity(self.card):
                self.card = member.instance.card
                return ()
        return self._make_canonical(staying[0])

    def _make_canonical(self, holder: FleetMember) -> Sequence[FleetMember]:
        """Take a member's card, which has other block hashes than the present one."""
        self._former.append(self.card)
        self.card = holder.instance.card
        for member in self._votes:
            member.matching = self._matches(member)
        return tuple(self._votes)

    def _matches(self, member: FleetMember) -> bool:
        """Tell whether a worker may share requests with the others: another deployment keeps no KV of this one, and takes token ids."""
        card = member.instance.card
        if member.instance.engine.is_deployment:
            return _text_of(card) == _text_of(self.card)
        return member.identity == identity(self.card)


def _is_of(request: Request, card: ModelCard) -> bool:
    """Tell whether a request's salt begins with a card's; what follows is an adapter's or a tenant's."""
    rest = request.salt.removeprefix(card.salt)
    return request.salt.startswith(card.salt) and (not rest or rest.startswith(b"|"))


def _text_of(card: ModelCard) -> frozenset[CardFile]:
    return frozenset(file for file in card.files if file.makes_text)


def _named(card: ModelCard) -> str:
    return f"salt {card.salt.hex()[:16]}"
