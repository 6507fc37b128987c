"""What a vLLM that does not start, or that dies, is said to lack."""

from types import SimpleNamespace

import pytest

from penstock.engine.child_output import ChildOutput
from penstock.engine.vllm.launch import why_it_died, why_it_does_not_start

_VLLMS_OWN = RuntimeError("EngineCore encountered an issue.\nSee stack trace (above) for the root cause.")


@pytest.mark.parametrize(
    ("codes", "why"),
    [
        ([None, -9], "its engine core has ended: killed by SIGKILL"),
        ([0, 3], "its engine core has ended: exit code 3"),
        ([None], "one of its processes ended without an error text"),
    ],
)
def test_a_dead_process_is_the_reason_where_nothing_was_printed(codes: list[int | None], why: str) -> None:
    manager = SimpleNamespace(processes=[SimpleNamespace(exitcode=code) for code in codes])
    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
    assert why_it_died(core, ChildOutput("vllm"), _VLLMS_OWN) == why


def test_packages_for_gpus_beside_a_torch_for_cpus_are_told_with_the_fix() -> None:
    text = why_it_does_not_start(
        RuntimeError("operator torchvision::nms does not exist"), ChildOutput("vllm")
    )
    assert "run `pip uninstall -y torchvision torchaudio torchcodec triton`" in text
