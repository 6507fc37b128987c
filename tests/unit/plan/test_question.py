"""Questions without an answer are refused in one line, with the sums and the remedy."""

import re

import pytest

from penstock.core.errors import ConfigError
from penstock.graph import build
from penstock.perf.hardware import find_hardware
from penstock.perf.model_shape import Parallel
from penstock.perf.pool import Demand
from penstock.plan.question import Question, graph_data, graph_of, graph_text


def ask(model="llama-3.1-8b", hardware="h100", devices=2, formats=(), **demand):
    asked = {"input_tokens": 1000, "output_tokens": 100, "ttft_s": 1.0, "itl_s": 0.05}
    return Question(
        model=model,
        hardware=find_hardware(hardware),
        devices=devices,
        demand=Demand(**asked | demand),
        formats=dict(formats),
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"model": "llama-3.1-7b"}, "its shape is not known; did you mean 'llama-3.1-70b'"),
        ({"devices": 0}, "--gpus: must be >= 1 and <= 1,024, got 0"),
        ({"input_tokens": 0}, "--isl: must be >= 1 and <= 131,072, got 0"),
        (
            {"input_tokens": 131_000, "output_tokens": 100},
            "131,100 tokens, and the context of llama-3.1-8b is 131,072; lower one of them",
        ),
        ({"ttft_s": 0.0}, "--slo-ttft: must be > 0 seconds, got 0"),
        ({"itl_s": float("nan")}, "--slo-itl: must be > 0 seconds, got nan"),
        ({"percentile": 100.0}, "--percentile: must be > 0 and < 100, got 100"),
        ({"formats": {"weight_dtype": "fp9"}}, "there is no number format 'fp9'; did you mean 'fp8'?"),
        ({"formats": {"expert_dtype": "fp8"}}, "expert_dtype: fp8 needs a model with experts"),
        # 141.1 GB are 70.6 G parameters of 2 bytes; 72 GB are 90 % of 80.
        (
            {"model": "llama-3.1-70b", "devices": 1},
            "72.0 GB of a device are usable, and with one device 141.1 GB of it are bf16 weights; 2 are enough (TP 2)",
        ),
        (
            {"model": "llama-3.1-70b", "devices": 2, "input_tokens": 100_000},
            "which leaves room for 8,835 tokens of KV, and a request has 100,100; 4 are enough (TP 4)",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(asked, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        ask(**asked)
    assert "\n" not in error.value.message


def test_unreachable_targets_are_refused_with_the_best_latency():
    question = ask(devices=4, ttft_s=0.001, itl_s=0.0001)
    assert question.search().aggregated() == question.search().disaggregated() == []
    models = question.search().models
    first_s = min(model.prefill_s(1000) for model in models)
    further_s = min(model.decode_step_s(1, 1050) for model in models)
    said = question.why_not()
    assert (
        f"--slo-ttft 0.001: the first token after 1,000 of prompt takes {first_s:.3g} s at best, on TP 4"
        in said
    )
    assert f"--slo-itl 0.0001: a token takes {further_s:.3g} s at best, on TP 4" in said
    assert "raise them" in said
    assert "raise it" in ask(itl_s=0.0001).why_not()


def test_a_graph_says_what_was_found():
    question = ask(formats={"weight_dtype": "fp8", "kv_dtype": "auto"})
    layout = question.search().disaggregated()[0]
    graph = graph_of(question, layout)
    prefill, decode = graph.roles.prefill, graph.roles.decode
    assert prefill is not None
    assert decode is not None
    for role_layout, role in zip(layout.role_layouts, (prefill, decode), strict=True):
        assert (role.replicas, role.tensor_parallel) == (role_layout.workers, role_layout.parallel.tp)
        assert role.max_batch_tokens == role_layout.max_batch_tokens
        assert role.max_running_requests is not None
        assert role.max_running_requests <= role_layout.max_batch_tokens
        assert role.weight_dtype == "fp8"
    assert graph.slo == question.slo
    # One pair of devices within a node of 8: 450 GB/s, of which 0.75 are reached.
    assert graph.router.disagg.link_bytes_per_s == pytest.approx(0.75 * 450e9)


def test_over_the_network_each_pair_of_devices_has_a_link():
    question = ask(devices=16)
    assert question.link_bytes_per_s(Parallel(tp=4), Parallel(tp=2)) == pytest.approx(0.75 * 50e9 * 2)


def test_the_text_of_a_graph_is_that_graph(tmp_path):
    question = ask()
    layout = question.search().aggregated()[0]
    text = graph_text(question, layout, "what it is\nand why")
    assert text.startswith("# what it is\n# and why\nname: plan\n")
    path = tmp_path / "graph.yaml"
    path.write_text(text)
    from penstock.graph import load

    assert load(path) == build(graph_data(question, layout))
