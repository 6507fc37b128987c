import pytest

from penstock.core.errors import ConfigError
from penstock.perf.hardware import Dtype, find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import parallelisms
from penstock.perf.roofline import Roofline


def test_gpt_oss_has_small_experts_and_a_window_in_every_other_layer():
    """Against its model card: 5.1 billion active parameters, a checkpoint of 60.8 GiB."""
    shape = find_shape("gpt-oss-120b")
    assert shape.active_params() / 1e9 == pytest.approx(5.13, rel=0.005)
    assert shape.windows == (128, None) * 18
    assert (shape.weight_dtype, shape.expert_dtype) == (Dtype.BF16, Dtype.MXFP4)
    experts = shape.moe_layers * shape.moe.num_experts * shape.expert_params()
    checkpoint_bytes = experts * Dtype.MXFP4.bytes + (shape.total_params() - experts) * Dtype.BF16.bytes
    assert checkpoint_bytes / 2**30 == pytest.approx(60.8, rel=0.005)
    assert shape.kv_bytes_per_token(Dtype.BF16) == 36 * 2 * 8 * 64 * 2


def test_a_directory_beside_the_graph_is_found(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(
        '{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}'
    )
    assert find_shape("mine", beside=tmp_path).layers == 2
    assert find_shape(str(tmp_path / "mine")).vocab == 99


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"model llama-3\.1-9b: its shape is not known; did you mean 'llama-3.1-8b'"
    ):
        find_shape("llama-3.1-9b")


@pytest.mark.parametrize("hardware", ["h100", "gb200"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-r1"])
def test_every_parallelism_tried_can_be_priced(name, hardware):
    shape, entry = find_shape(name), find_hardware(hardware)
    choices = list(parallelisms(shape, entry, devices_max=64))
    assert len(choices) == len(set(map(repr, choices)))
    for parallel in choices:
        assert parallel.devices <= 64
        assert parallel.tp <= entry.scale_up_devices
        assert Roofline(shape, entry, parallel).decode_step_s(1, 1) > 0
