"""Models with two sets of rotary factors: one set holds for all requests, by the context that is served."""

import json
import shutil

import pytest
from structlog.testing import capture_logs

from penstock.engine.paged.memory import PagedConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding  # noqa: E402
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding  # noqa: E402

from penstock.engine.paged.models import pin_rotary  # noqa: E402
from penstock.engine.paged.runner import PagedRunner  # noqa: E402

pytestmark = pytest.mark.engine
ORIGINAL_TOKENS = 64
"""What the tiny phi3 was trained on before its context was stretched to 1,024."""


@pytest.fixture(scope="session")
def long_everywhere(checkpoint, tmp_path_factory, reference_at):
    """What transformers says where the short factors are the long ones, so that no length can change them."""
    path = tmp_path_factory.mktemp("long") / "phi3"
    shutil.copytree(checkpoint("phi3"), path)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = config["rope_parameters"]["long_factor"]
    (path / "config.json").write_text(json.dumps(config))
    return reference_at(path)


def short_and_long(prompts):
    """Indices of a few prompts of either kind, in turn."""
    short = [index for index, prompt in enumerate(prompts) if len(prompt) < ORIGINAL_TOKENS - 20]
    long = [index for index, prompt in enumerate(prompts) if len(prompt) > ORIGINAL_TOKENS]
    return [index for pair in zip(short[:4], long[:4], strict=True) for index in pair]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_tokens": 29},
        *(
            pytest.param(one, marks=pytest.mark.nightly)
            for one in ({}, {"context_length": ORIGINAL_TOKENS + 128})
        ),
    ],
)
def test_a_long_context_takes_the_long_factors_for_rows_of_any_length(engine, long_everywhere, settings):
    paged, names = engine("phi3", **settings), short_and_long(long_everywhere.prompts)
    requests = long_everywhere.requests()
    # alone, beside longer ones, and with prefixes cached by either
    for chosen in (names[:1], names, names[::-1]):
        tokens = paged.run(*(requests[index] for index in chosen))
        assert tokens == {str(index): long_everywhere.output(index) for index in chosen}
        tokens.clear()
    assert paged.scheduler.load().prefix_hit_tokens > 100


def test_a_start_says_that_all_requests_take_the_long_factors(checkpoint):
    for context_length, said in ((None, [1024]), (65, [65]), (64, [])):
        config = PagedConfig(model=str(checkpoint("phi3")), kv_blocks=8, context_length=context_length)
        with capture_logs() as logs:
            PagedRunner(config).start()
        assert [log["context_tokens"] for log in logs if log["event"] == "long_rotary_factors"] == said


def rope(kind, **more):
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + index for index in range(8)]}
    scale = {"longrope": factors | {"original_max_position_embeddings": 64}, "dynamic": {"factor": 4.0}}
    return {"rope_type": kind, "rope_theta": 1e4, **scale[kind], **more}


ROTARIES = {
    "phi3": (Phi3RotaryEmbedding, transformers.Phi3Config, rope("longrope")),
    "llama": (LlamaRotaryEmbedding, transformers.LlamaConfig, rope("dynamic")),
    "phimoe": (
        PhimoeRotaryEmbedding,
        transformers.PhimoeConfig,
        rope("longrope", short_mscale=1.1, long_mscale=1.3),
    ),
}


@pytest.mark.parametrize(("kind", "make_config", "parameters"), ROTARIES.values(), ids=list(ROTARIES))
def test_a_token_is_rotated_alike_whatever_is_beside_it(kind, make_config, parameters):
    config = make_config(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=parameters
    )
    if parameters["rope_type"] == "longrope":
        config.original_max_position_embeddings = 64
    rotary, x = kind(config), torch.zeros(1, 1, 64)
    few, last = torch.arange(16)[None], torch.tensor([[1000]])
    pin_rotary(rotary, 1001)
    alone = rotary(x, few)
    for together in (rotary(x, torch.cat((few, last), -1)), rotary(x, position_ids=few)):
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one, other[:, :16])
    assert alone[0].shape == (1, 16, 16)
