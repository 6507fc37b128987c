"""Weights of a checkpoint: large ones show how far they are."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from penstock.engine.paged.model import weights
from penstock.engine.paged.model.checkpoint import Checkpoint
from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("large", [True, False])
def test_large_weights_show_a_bar_and_small_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], large: bool
) -> None:
    checkpoint = Checkpoint.open(str(make_checkpoint(tmp_path / "tiny", "llama")))
    capfd.readouterr()
    if large:
        monkeypatch.setattr(weights, "_SHOWN_BYTES_MIN", 0)
    config = weights.read_config(checkpoint)
    weights.load_model(checkpoint, config, "float32", torch.device("cpu"), context_length=64)
    assert ("Loading weights: 100%" in capfd.readouterr().err) is large
