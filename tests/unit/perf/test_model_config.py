"""What a `config.json` says of a model, in the words of its family; what is not understood is refused."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.perf.hardware import Dtype, find_hardware
from penstock.perf.model_config import load_shape, shape_of
from penstock.perf.roofline import Roofline

LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "vocab_size": 128256,
}  # fmt: skip
EXPERTS = LLAMA | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, 32),
        ({"first_k_dense_replace": 3}, 29),
        ({"first_k_dense_replace": 99}, 0),
        ({"decoder_sparse_step": 4}, 8),
        ({"mlp_only_layers": [0, 31, 99]}, 30),
        ({"interleave_moe_layer_step": 2}, 16),
        ({"moe_layer_freq": 2}, 16),
    ],
)
def test_layers_that_have_experts(fields: dict, layers: int) -> None:
    shape = shape_of(EXPERTS | fields, name="m")
    assert shape.moe_layers == layers
    assert Roofline(shape, find_hardware("h100")).decode_step_s(8, 1000) > 0


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None,) * 32),
        ({"sliding_window": 512}, (512,) * 32),
        ({"sliding_window": 512, "use_sliding_window": False}, (None,) * 32),
        (
            {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 30},
            (None,) * 30 + (512,) * 2,
        ),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, (512, 512, 512, None) * 8),
        ({"sliding_window": 512, "model_type": "gemma2"}, (512, None) * 16),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16},
            (512, None) * 16,
        ),
        (
            {"attention_chunk_size": 8192, "layer_types": ["full_attention", "chunked_attention"] * 16},
            (None, 8192) * 16,
        ),
    ],
)
def test_layers_that_have_a_window(fields: dict, windows: tuple[int | None, ...]) -> None:
    assert shape_of(LLAMA | fields, name="m").windows == windows


def compressed(name, bits, kind):
    weights = {"num_bits": bits, "type": kind}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.mark.parametrize(
    ("quantization", "dtypes"),
    [
        (None, (Dtype.BF16, Dtype.BF16)),
        ({"quant_method": "fp8"}, (Dtype.FP8, Dtype.FP8)),
        ({"quant_method": "mxfp4"}, (Dtype.BF16, Dtype.MXFP4)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (Dtype.NVFP4, Dtype.NVFP4)),
        (compressed("nvfp4-pack-quantized", 4, "float"), (Dtype.NVFP4, Dtype.NVFP4)),
        (compressed("float-quantized", 8, "float"), (Dtype.FP8, Dtype.FP8)),
        (compressed("int-quantized", 8, "int"), (Dtype.INT8, Dtype.INT8)),
    ],
)
def test_formats_of_quantised_checkpoints(quantization, dtypes):
    shape = shape_of(EXPERTS | {"quantization_config": quantization}, name="m")
    assert (shape.weight_dtype, shape.expert_dtype) == dtypes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "c.json: hidden_size: missing; a decoder's config.json states it"),
        ({"vocab_size": -1}, "c.json: vocab_size: must be a whole number from 1 to 1,000,000,000, got -1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: must be a whole number from 1 to"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: must be a whole number from 1 to 10,000, got 1"),
        ({"layer_types": 3}, "layer_types: must be a list, got '3'"),
        ({"layer_types": ["full_attention"]}, "layer_types: has 1 entries for 32 layers"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types: 'linear_attention' has no price; known: full"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: must be a whole number from 0 to 128, got 129"),
        ({"text_config": []}, "c.json: text_config: must be a mapping, got '[]'"),
        ({"text_config": {}}, "c.json: text_config: hidden_size: missing"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "quantization_config: 'awq' is no format with a price; known: fp8, int8, mxfp4, nvfp4; or leave it out",
        ),
        (
            {"quantization_config": compressed("pack-quantized", 4, "int")},
            "'compressed-tensors' is no format with a price",
        ),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        shape_of(EXPERTS | fields, name="m", source="c.json")
    assert message in refused.value.message


def test_no_value_of_any_field_is_anything_but_priced_or_refused() -> None:
    text = (files("penstock.perf") / "data" / "deepseek-r1.json").read_text(encoding="utf-8")
    config = json.loads(text)
    more = ("layer_types", "sliding_window", "text_config", "head_dim", "mlp_only_layers", "torch_dtype")
    priced = 0
    for key in (*config, *more):
        for value in (None, 0, -1, 1, 3, 10**30, 1.5, "x", [], {}, [1], True, {"a": 1}, float("nan")):
            try:
                roofline = Roofline(shape_of(config | {key: value}, name="m"), find_hardware("gb300"))
            except ConfigError:
                continue
            assert roofline.prefill_s(100, 10) > 0
            assert roofline.decode_step_s(4, 1000) > 0
            priced += 1
    assert priced > 100


def test_config_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="no such file; expected a model directory"):
        load_shape(tmp_path)
    for content, message in (
        (b"{", "line 1: not JSON"),
        (b"[]", r"config.json: must be a mapping, got '\[\]'"),
        (b"\x7fELF\xd0", r"not UTF-8 text \(byte 4\); a config.json is JSON"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            load_shape(tmp_path)
    file.write_text(json.dumps(LLAMA))
    assert load_shape(tmp_path).layers == 32
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory; expected a model"):
        load_shape(tmp_path)


def test_the_text_of_a_model_that_sees_is_its_shape():
    assert shape_of({"text_config": EXPERTS}, name="m") == shape_of(EXPERTS, name="m")
