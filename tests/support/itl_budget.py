"""An ITL interference budget by itself."""

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.load import WorkerLoad
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.disagg.itl_budget import ItlBudget
from penstock.router.metrics import RouterMetrics
from penstock.router.policy.policies import make_policy
from penstock.router.policy.selector import WorkerSelector
from penstock.router.workers.loads import LoadTracker


def itl_budget(share: float, peers: NDArray[np.int64], loads: LoadTracker | None = None) -> ItlBudget:
    """Make budgets of workers that have so many other routers each; their loads are in `loads` where given."""
    loads = loads or LoadTracker(len(peers))
    for slot, count in enumerate(peers.tolist()):
        loads.report(slot, WorkerLoad(peers=count))
    config = RouterConfig(disagg=DisaggConfig(late_token_share=share))
    return ItlBudget(config, WorkerSelector(make_policy("kv")), loads, RouterMetrics(None))
