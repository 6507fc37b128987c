"""The paged engine: the shared scheduler and step loop around a `PagedRunner` on its own thread."""

from penstock.core.hashing import DEFAULT_KEY
from penstock.engine.batched import BatchedEngine
from penstock.engine.kv_tiers import TierMaker
from penstock.engine.paged.config import PagedConfig
from penstock.engine.paged.runner import PagedRunner
from penstock.engine.paged.structured.grammars import Grammars
from penstock.engine.runner import ThreadedRunner
from penstock.engine.scheduling.config import SchedulerConfig


def paged_engine(
    config: PagedConfig,
    scheduling: SchedulerConfig | None = None,
    *,
    hash_key: bytes = DEFAULT_KEY,
    make_tiers: TierMaker | None = None,
) -> BatchedEngine:
    """Make an engine; `start` loads its model, and then makes the KV tiers below its device."""
    grammars = Grammars()
    return BatchedEngine(
        ThreadedRunner(PagedRunner(config, grammars)),
        scheduling,
        hash_key=hash_key,
        make_tiers=make_tiers,
        preparer=grammars,
    )
