"""Floor 10, public: conformance suites for every seam, to test your own implementations."""

from penstock.testing.engines.batched import BatchedEngineSuite
from penstock.testing.engines.caching import CachingEngineSuite
from penstock.testing.engines.engine import EngineSuite

__all__ = ["BatchedEngineSuite", "CachingEngineSuite", "EngineSuite"]
