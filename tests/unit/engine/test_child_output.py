import subprocess
import sys
import threading

import pytest

from penstock.engine.child_output import ChildOutput


def printed_by(program: str) -> ChildOutput:
    output = ChildOutput("vllm")
    with output.taken():
        subprocess.run([sys.executable, "-c", program], check=False)
    for thread in threading.enumerate():
        if thread.name == "vllm output":
            thread.join(timeout=10)
    return output


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('all is well')", None),
        ("raise ValueError('no such model')", "no such model"),
        ("print('(Worker pid=3) ERROR 11-23 21:15:52 [a.py:3] torch.OutOfMemoryError: 3 GiB')", "3 GiB"),
        (
            "print('ValueError: first'); print('x RuntimeError: Engine core initialization failed. See root cause above')",
            "first",
        ),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_the_reason_is_the_last_error_that_is_no_consequence(program: str, reason: str | None) -> None:
    assert printed_by(program).reason() == reason
