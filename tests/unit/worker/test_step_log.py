"""The file that says when a worker's tokens came out of its engine."""

from time import perf_counter

import pytest

from penstock.core.errors import ConfigError
from penstock.core.ids import RequestId
from penstock.core.types.load import Step
from penstock.core.types.requests import Delta, FinishReason
from penstock.core.wire import pack_tokens
from penstock.worker.step_log import StepLog, read_steps


def step_of(**tokens: int) -> Step:
    return Step(
        deltas=tuple(
            Delta(request_id=RequestId(name), token_ids=pack_tokens(range(count)))
            for name, count in tokens.items()
        )
    )


def test_each_step_that_yields_tokens_is_a_line_with_its_moment(tmp_path):
    log = StepLog.open(str(tmp_path / "new"), "worker-1", bytes_max=1 << 20)
    before_s = perf_counter()
    log.note(step_of(a=1, b=3))
    log.note(Step(deltas=(Delta(request_id=RequestId("a"), finish_reason=FinishReason.STOP),)))
    log.note(step_of(a=1))
    after_s = perf_counter()
    log.close()

    (steps,) = read_steps(tmp_path / "new").values()
    assert [step.tokens for step in steps] == [(("a", 1), ("b", 3)), (("a", 1),)]
    assert before_s <= steps[0].at_s <= steps[1].at_s <= after_s


def test_a_full_file_stays_readable(tmp_path):
    log = StepLog.open(str(tmp_path), "w", bytes_max=100)
    for _ in range(10):
        log.note(step_of(request=1))
    log.close()
    assert log.path.stat().st_size <= 100
    assert 1 <= len(read_steps(tmp_path)["w"]) < 10


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"worker\.step_log: .*file"):
        StepLog.open(str(tmp_path / "file"), "w", bytes_max=100)
