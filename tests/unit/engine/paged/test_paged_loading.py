"""What happens to models and settings that cannot work: one line that says what is wrong."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.paged.memory import PagedConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from penstock.engine.paged import models  # noqa: E402
from penstock.engine.paged.runner import PagedRunner  # noqa: E402

pytestmark = pytest.mark.engine


def refused(model: Path, **settings) -> str:
    with pytest.raises(ConfigError) as raised:
        PagedRunner(PagedConfig(model=str(model), kv_blocks=8, **settings)).start()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def changed(source: Path, path: Path, **fields) -> Path:
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    kept = {key: value for key, value in (config | fields).items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    return path


def test_a_good_one_says_what_it_is(checkpoint):
    info = PagedRunner(PagedConfig(model=str(checkpoint("gemma3")), kv_blocks=8, block_size=4)).start()
    assert (info.num_blocks, info.block_size, info.context_length, info.vocab_size) == (8, 4, 1024, 512)
    assert info.eos_token_ids == (0,)
    assert info.kv_bytes_per_block == 1 * 2 * 4 * 2 * 16 * 4, (
        "a layer over the whole context, and as many with a window"
    )


def without_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def cut_short(path: Path) -> None:
    models = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(models[: len(models) // 2])


@pytest.mark.parametrize(
    ("fields", "spoil", "message"),
    [
        ({}, without_weights, "no weights"),
        ({}, cut_short, "the weights cannot be loaded"),
        ({"num_hidden_layers": 3}, None, "lack 9 tensors that config.json asks for, such as model.layers.2."),
        ({"intermediate_size": 96}, None, "the weights cannot be loaded"),
        ({"model_type": "brand_new"}, None, "does not read its config.json"),
        (
            {"head_dim": None, "num_attention_heads": 7},
            None,
            "not a multiple of the number of attention heads (7)",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(checkpoint, tmp_path, fields, spoil, message):
    path = changed(checkpoint("llama"), tmp_path / "model", **fields)
    if spoil is not None:
        spoil(path)
    assert message in refused(path)


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", pytest.param("vocab_size", marks=pytest.mark.nightly)]
)
@pytest.mark.slow
def test_the_library_adds_no_words_of_its_own(checkpoint, tmp_path, field):
    path = changed(checkpoint("llama"), tmp_path / "model", **{field: 10})
    program = (
        "import sys\n"
        "from penstock.core.errors import ConfigError\n"
        "from penstock.engine.paged.memory import PagedConfig\n"
        "from penstock.engine.paged.runner import PagedRunner\n"
        "try:\n"
        "    PagedRunner(PagedConfig(model=sys.argv[1], kv_blocks=8)).start()\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{path}: the weights ")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


SMALL = {"hidden_size": 64, "vocab_size": 64}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.DeepseekV3Config(num_hidden_layers=2, hidden_size=64),
            "it compresses keys and values (kv_lora_rank)",
        ),
        (
            transformers.Qwen3NextConfig(num_hidden_layers=4, hidden_size=64),
            "it has layers of type linear_attention",
        ),
        (transformers.MambaConfig(num_hidden_layers=2, **SMALL), "cannot run it"),
        (
            transformers.BloomConfig(n_layer=2, max_position_embeddings=64, **SMALL),
            "BloomForCausalLM has no attention interface",
        ),
        (transformers.ViTConfig(hidden_size=64), "vit is no causal language model"),
    ],
    ids=["latent", "recurrent", "no attention", "attention of its own", "no language model"],
)
def test_models_that_it_cannot_run_are_refused(tmp_path, config, message):
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")  # refused before its weights are read
    assert message in refused(tmp_path)


def test_attention_sinks(tmp_path):
    config = transformers.GptOssConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=64, vocab_size=64, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "its attention needs s_aux" in refused(tmp_path)


def test_context_beyond_the_model(checkpoint):
    message = refused(checkpoint("llama"), context_length=2000)
    assert message == "context_length: must be <= 1024, the model's own, got 2000"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(checkpoint):
    assert "sees no GPU; use cpu" in refused(checkpoint("llama"), device="cuda")


def test_large_weights_show_how_far_they_are_and_small_ones_nothing(checkpoint, monkeypatch, capsys):
    def said() -> str:
        PagedRunner(PagedConfig(model=str(checkpoint("gemma3")), kv_blocks=8, block_size=4)).start()
        return capsys.readouterr().err

    assert said() == ""
    monkeypatch.setattr(models, "_SHOWN_BYTES_MIN", 1)
    shown = said()
    assert shown.startswith("\rLoading weights:   0%|")
    assert "100%|" in shown
