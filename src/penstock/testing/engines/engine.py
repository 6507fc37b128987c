"""The core conformance suite of engines: what every engine does. Subclass it and make an engine.

    class TestMyEngine(EngineSuite):
        def make_engine(self, setup):
            return MyEngine(blocks=setup.kv_blocks, ...)

`EngineCase` lists what can be said of an engine besides. It needs no more than `seams.Engine`, and nothing about how requests
are batched: a step may bring any number of tokens. Add the suites whose protocols the engine claims:

- `CachingEngineSuite`: it has a prefix cache and sends KV events.
- `MovableKvSuite`: `KvBlocks`, `KvPartialBlocks` and `RoleAware`; Penstock moves its KV and changes its role.
- `BatchedEngineSuite`: it is a runner in a `BatchedEngine`, and schedules like the mock engine.
"""

from penstock.testing.engines.answers import EngineAnswers
from penstock.testing.engines.lifecycle import EngineLifecycle


class EngineSuite(EngineAnswers, EngineLifecycle):
    """Tests of `Engine`."""
