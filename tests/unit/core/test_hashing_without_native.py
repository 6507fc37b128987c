import pytest
import structlog

from penstock.core import hashing, native
from penstock.core.hashing import block_hashes


@pytest.mark.parametrize("num_blocks", [2, 100])
def test_python_alone_gives_the_same_hashes(num_blocks, monkeypatch):
    arguments = (range(16 * num_blocks), 16, b"salt", [(20, b"image")])
    expected = block_hashes(*arguments)
    monkeypatch.setattr(hashing, "native", None)
    assert block_hashes(*arguments).tolist() == expected.tolist()


def test_a_missing_native_module_is_said(monkeypatch):
    monkeypatch.setattr(native, "native", None)
    with structlog.testing.capture_logs() as lines:
        native.warn_if_disabled()
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("native_disabled", "warning")


def test_a_present_native_module_is_not_worth_a_line(monkeypatch):
    monkeypatch.setattr(native, "native", object())
    with structlog.testing.capture_logs() as lines:
        native.warn_if_disabled()
    assert lines == []
