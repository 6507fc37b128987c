"""What servers' metrics tell."""

import pytest

from penstock.core.types.load import ModelLoad
from penstock.engine.openai.server import ServerLoad, deployment_load, read_load

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",enable_prefix_caching="True"} 1.0
"""
SGLANG = """sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.5
"""


def test_vllm_with_two_engines():
    assert read_load(VLLM) == ServerLoad(running=7, waiting=1, kv_usage=0.5, kv_tokens=1600, block_size=16)


def test_another_deployments_load_is_of_all_its_workers():
    load = ModelLoad(workers=4, block_size=16, running_requests=9, active_blocks=50, total_blocks=200)
    read = deployment_load(load)
    assert (read.workers, read.running, read.kv_usage, read.kv_tokens) == (4, 9, 0.25, 3200)


def test_sglang_and_llamacpp():
    assert read_load(SGLANG) == ServerLoad(5, 2, 0.5)
    assert read_load("llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n") == ServerLoad(2, 1)


@pytest.mark.parametrize(
    "text",
    [
        "", "not metrics", "vllm:num_requests_running", "vllm:num_requests_running NaN", "vllm:num_requests_running -3",
        "vllm:num_requests_running +Inf", "vllm:num_requests_running{ 3", "sglang:num_running_reqs 1e300",
        'vllm:cache_config_info{block_size="None",num_gpu_blocks="x"} 1', "\x00" * 50,
    ],
)  # fmt: skip
def test_what_is_no_count_is_left_out(text):
    assert read_load(text) == ServerLoad()


@pytest.mark.parametrize(
    "labels",
    [
        'block_size="16",num_gpu_blocks="%s"' % ("9" * 5000), "a" * 1_000_000, 'a="' * 300_000, "}" * 1_000_000,
    ],
    ids=["digits", "word", "quotes", "braces"],
)  # fmt: skip
def test_labels_of_any_length_are_read_in_linear_time(labels):
    assert read_load(f"vllm:cache_config_info{{{labels}}} 1") == ServerLoad()
