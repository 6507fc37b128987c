"""How long a computed prompt can be fetched, as its router reckons."""

from penstock.core.ids import PinId, WorkerId
from penstock.core.types import KvHandle
from penstock.router.handed_over import HandedOver

HANDLE = KvHandle(producer=WorkerId(1), pin_id=PinId(2), ttl_s=5.0, num_tokens=9, block_ids=b"")


def handed_over(handle):
    return HandedOver(handle, 10.0, worker_id=WorkerId(3), give_up=lambda: None)


def test_a_handle_has_the_time_that_is_left():
    handed = handed_over(HANDLE)
    assert handed.handle(12.0).ttl_s == 3.0
    assert (handed.num_tokens(14.9), handed.num_tokens(15.0)) == (9, 0)
    assert handed.handle(15.0) is None
    assert handed.producer == WorkerId(1)


def test_of_kv_that_could_not_be_kept_there_is_none():
    handed = handed_over(None)
    assert (handed.handle(10.0), handed.num_tokens(10.0), handed.producer) == (None, 0, None)
