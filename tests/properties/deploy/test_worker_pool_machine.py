"""The pool of workers under any order of changes, failures and slow ends, over processes by script."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import ReplicaState, Role
from penstock.deploy.messages import Ready
from penstock.sim.loop import SimLoop
from tests.support.scripted_pool import PoolScene, ScriptedProcess

_ROLES = {
    "prefill": {"engine": "vllm", "hardware": "h100"},
    "decode": {"engine": "vllm", "hardware": "h100", "tensor_parallel": 2},
}
_GPUS = 8
_roles = st.sampled_from([Role.PREFILL, Role.DECODE])


class WorkerPoolMachine(RuleBasedStateMachine):
    """Changes one pool; each rule runs the loop until nothing is left to do at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=SimLoop)
        self.scene = PoolScene(_ROLES, devices=_GPUS)
        self.context = self.scene.running()
        self.pool = self.runner.run(self.context.__aenter__())
        self.revision = 0

    def do(self, change):
        """Make a change; returns whether it was accepted."""

        async def changed():
            try:
                await change
            except (RequestError, Unavailable):
                return False
            await asyncio.sleep(0.01)
            return True

        return self.runner.run(changed())

    def scale(self):
        return self.runner.run(self.pool.scale())

    @rule(role=_roles, count=st.integers(1, 3), slow=st.booleans(), ignores=st.booleans())
    def add(self, role, count, slow, ignores):
        before = self.scale()
        self.scene.next = lambda: ScriptedProcess(is_slow=slow, ignores=ignores)
        room = {limit.role: limit.room for limit in before.limits}[role]
        assert self.do(self.pool.add(role, count, by="machine")) == (count <= room)

    @rule(data=st.data())
    def retire(self, data):
        names = data.draw(
            st.lists(st.sampled_from([r.name for r in self.scale().replicas]), min_size=1, max_size=3)
        )
        self.do(self.pool.retire(names, by="machine"))

    @rule(data=st.data(), role=_roles)
    def flip(self, data, role):
        name = data.draw(st.sampled_from([replica.name for replica in self.scale().replicas]))
        self.do(self.pool.flip(name, role, by="machine"))

    @rule(data=st.data(), status=st.sampled_from([0, 1, -9]))
    def end_a_process(self, data, status):
        name = data.draw(st.sampled_from([replica.name for replica in self.scale().replicas]))
        if name in self.scene.processes:
            self.scene.processes[name].end(status)

    @precondition(lambda self: any(r.state is ReplicaState.STARTING for r in self.scale().replicas))
    @rule()
    def become_ready(self):
        for replica in self.scale().replicas:
            if replica.state is ReplicaState.STARTING and replica.name in self.scene.processes:
                self.scene.processes[replica.name].say(Ready())

    @rule(seconds=st.sampled_from([0.1, 1.0, 40.0]))
    def wait(self, seconds):
        self.runner.run(asyncio.sleep(seconds))

    @invariant()
    def is_sound(self):
        self.pool.check()
        scale = self.scale()
        assert scale.revision >= self.revision
        self.revision = scale.revision
        assert sum(len(replica.devices) for replica in scale.replicas) <= _GPUS
        assert any(
            replica.role is Role.DECODE or replica.state is ReplicaState.FLIPPING
            for replica in scale.replicas
            if replica.state is not ReplicaState.DRAINING
        ), "somebody is left to answer"

    def teardown(self):
        self.runner.run(self.context.__aexit__(None, None, None))
        self.runner.close()


TestWorkerPool = WorkerPoolMachine.TestCase
TestWorkerPool.settings = settings(
    stateful_step_count=30, deadline=None, max_examples=max(10, settings().max_examples // 3)
)
