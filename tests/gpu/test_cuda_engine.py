"""The paged engine on a real device: nothing of a step is under way when it ends."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from penstock.engine.paged.memory import make_fence  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def test_a_fence_waits_for_what_was_queued() -> None:
    device = torch.device("cuda:0")
    fence = make_fence(device)
    square = torch.rand(4096, 4096, device=device)
    for _ in range(50):
        square = square @ square * 1e-4
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    assert not done.query(), "the device is too quick for this test"
    fence.wait()
    assert done.query()
