"""LoRA adapters in vLLM, against the same weights merged into the model."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.core.errors import ConfigError
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from tests.vllm.conftest import ALPHA, RANK

pytestmark = pytest.mark.nightly

PROMPT = list(range(20, 60))


def merged(model_dir, adapter_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    for number, layer in enumerate(model.model.layers):
        name = f"base_model.model.model.layers.{number}.self_attn.q_proj"
        product = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        layer.self_attn.q_proj.weight.data += ALPHA / RANK * product
    return model


def greedy(model, tokens):
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def request_of(number, adapter):
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    return Request(
        request_id=f"a{number}",
        model="tiny",
        token_ids=pack_tokens(PROMPT),
        sampling=sampling,
        adapter=adapter,
        salt=(adapter or "").encode(),
    )


def test_an_adapter_answers_as_its_merged_weights_beside_the_base_model(
    started, spec_of, model_dir, adapter_dir
):
    running = started(spec_of(adapters=("shift",), args={"lora_modules": {"shift": str(adapter_dir)}}))
    base, shifted = running.answers(request_of(0, None), request_of(1, "shift"))
    torch.set_num_threads(1)
    assert base.token_ids == greedy(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), 16)
    assert shifted.token_ids == greedy(merged(model_dir, adapter_dir), 16)
    assert base.token_ids != shifted.token_ids


def test_an_adapter_without_weights_is_refused_in_one_line(started, spec_of, adapter_dir, tmp_path):
    (tmp_path / "adapter_config.json").write_bytes((adapter_dir / "adapter_config.json").read_bytes())
    with pytest.raises(ConfigError, match="adapters: empty: ") as failed:
        started(spec_of(adapters=("empty",), args={"lora_modules": {"empty": str(tmp_path)}}))
    assert "\n" not in failed.value.message
