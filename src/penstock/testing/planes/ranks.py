"""The conformance suite of connections to data-parallel ranks."""

import msgspec
import pytest

from penstock.core.errors import PenstockError
from penstock.core.ids import WorkerId
from penstock.testing.planes.direct import DirectStreamsSuite
from penstock.testing.planes.recording_sink import RecordingSink
from penstock.testing.planes.request_plane import Scene
from penstock.testing.planes.scripted_worker import RANKS, scripted_request


class RanksSuite(DirectStreamsSuite):
    """The contract of `RequestPlane` and of direct streams, and that a connection is for one rank of a worker."""

    def test_a_connection_is_for_one_rank(self) -> None:
        async def scenario(scene: Scene) -> None:
            sink = RecordingSink()
            instance = msgspec.structs.replace(
                scene.instance, worker_id=WorkerId(99), rank=3, registered_id=scene.instance.worker_id
            )
            connection = await scene.harness.plane().connect(instance, sink)
            for each, to in ((scene.connection, scene.sink), (connection, sink)):
                each.submit(scripted_request("rank", request_id="a"))
                await to.finished("a")
            assert (scene.sink.tokens("a"), sink.tokens("a")) == ([0], [3])
            assert connection.worker_id == 99
            await connection.close()
            with pytest.raises(PenstockError):
                await scene.harness.plane().connect(msgspec.structs.replace(instance, rank=RANKS), sink)

        self.run(scenario)
