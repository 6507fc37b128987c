"""`kv` without each of its terms, `kv` without queueing requests, and `product` with queueing.

Holding goes by the rows `queue` and `kv_wait` of a policy's terms, which stay in all but the one that holds nothing: what is left
out of the price is taken off in a row of its own.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.product import Product
from penstock.router.predicted_seconds import PredictedSeconds
from penstock.seams import RoutingContext

_TERMS = PredictedSeconds.term_names


class KvWithout:
    """The prices of `kv` less one term, which a subclass names."""

    left_out: ClassVar[str]
    name: ClassVar[str]
    term_names: ClassVar[tuple[str, ...]] = (*_TERMS, "left_out")

    def __init_subclass__(cls, *, left_out: str) -> None:
        cls.left_out = left_out
        cls.name = f"kv-without-{left_out}"

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        summed: NDArray[np.float64] = self.terms(context).sum(axis=0)
        return summed

    def terms(self, context: RoutingContext) -> NDArray[np.float64]:
        terms = PredictedSeconds().terms(context)
        return np.vstack([terms, -terms[_TERMS.index(self.left_out)]])


class KvWithoutQueue(KvWithout, left_out="queue"): ...


class KvWithoutKvWait(KvWithout, left_out="kv_wait"): ...


class KvWithoutPrefill(KvWithout, left_out="prefill"): ...


class KvWithoutItl(KvWithout, left_out="itl"): ...


class KvWithoutSlowdown(KvWithout, left_out="slowdown"): ...


class KvWithoutQueueExternality(KvWithout, left_out="queue_externality"): ...


class KvWithoutKvPressure(KvWithout, left_out="kv_pressure"): ...


class KvWithoutRequestQueue:
    """The prices of `kv` without its terms: the router queues no request for a policy that has no terms of waiting."""

    name: ClassVar[str] = "kv-without-request-queue"

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        return PredictedSeconds().costs(context)


class ProductWithRequestQueue:
    """The prices of `product`, and beside them the terms of waiting of `kv`, so that the router queues requests as for `kv`."""

    name: ClassVar[str] = "product-with-request-queue"
    term_names: ClassVar[tuple[str, ...]] = ("queue", "kv_wait", "rest")

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        return Product().costs(context)

    def terms(self, context: RoutingContext) -> NDArray[np.float64]:
        known = PredictedSeconds().terms(context)
        queue, kv_wait = known[_TERMS.index("queue")], known[_TERMS.index("kv_wait")]
        return np.stack([queue, kv_wait, Product().costs(context) - queue - kv_wait])
