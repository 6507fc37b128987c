"""Engine suite of movable KV: an engine whose KV Penstock transfers, and whose role it changes."""

import msgspec

from penstock.core.ids import RequestId
from penstock.core.types.instances import Role
from penstock.seams import RoleAware
from penstock.testing.engines.movable_kv.blocks import EngineBlocks
from penstock.testing.engines.movable_kv.partial_blocks import EnginePartialBlocks
from penstock.testing.engines.probe import make_request


class MovableKvSuite(EngineBlocks, EnginePartialBlocks):
    """Tests of `KvBlocks`, `KvPartialBlocks` and `RoleAware`. They compare engines: `starts_slowly` must be False."""

    def test_answers_are_equal_in_every_role(self) -> None:
        request = make_request("a", self.prompt(40), max_tokens=6)

        async def main() -> None:
            async with self.moving() as probe:
                assert isinstance(probe.engine, RoleAware), "claims to change roles without RoleAware"
                answers = []
                for role in Role:
                    info = probe.engine.assume(role)
                    same = {
                        "max_batch_tokens": info.max_batch_tokens,
                        "prompts_at_once": info.prompts_at_once,
                    }
                    assert info == msgspec.structs.replace(probe.info, **same)
                    probe.submit(msgspec.structs.replace(request, request_id=RequestId(role)))
                    await probe.finish()
                    answers.append(probe.answers[role].token_ids)
                assert answers[0] == answers[1] == answers[2] != []

        self.run(main())
