"""What no deployment could run, and what is said of it: fields of a graph beside `model: demo`, as YAML."""

import pytest
import yaml

from penstock.core.errors import ConfigError
from penstock.graph import build

WIDE = "engine: vllm, hardware: h100, tensor_parallel: 16, nodes: 2"
REFUSED = [
    # roles together
    ("roles: {}", "roles: no role is described; describe aggregated, or prefill and decode"),
    ("roles: {prefill: {}}", "roles: prefill needs decode"),
    ("roles: {decode: {}}", "roles: decode needs prefill"),
    ("roles: {prefill: {kv_dtype: float16}, decode: {kv_dtype: float32}}", "prefill.kv_dtype is 'float16' and decode.kv_dtype is 'float32'"),
    ("roles: {prefill: {engine: mock}, aggregated: {}}", "roles: prefill.engine is 'mock' and aggregated.engine is 'paged'; KV moves"),
    ("roles: {prefill: {engine: mock, weight_dtype: fp8}, decode: {engine: mock}}", "prefill.weight_dtype is 'fp8' and decode.weight_dtype is 'auto'"),
    ("roles: {prefill: {engine: mock, mock: {kv_bytes_per_block: 4096}}, decode: {engine: mock}}", "prefill.mock.kv_bytes_per_block is 4096 and decode"),
    ("roles: {prefill: {block_size: 32}, decode: {}}", "roles.prefill.block_size: unknown key; all roles of a graph have blocks of one size"),
    ("roles: {prefill: {}, decode: {model: other}}", "roles.decode.model: unknown key; all roles of a graph run one model"),
    # one role
    ("roles: {aggregated: {hardware: h1000}}", "roles.aggregated.hardware: unknown 'h1000'; did you mean 'h100'?"),
    ("roles: {aggregated: {weight_dtype: fp8}}", "or 'float16' with engine 'paged', got 'fp8'; engine 'mock' takes any, to be simulated"),
    ("roles: {aggregated: {weight_dtype: fp4}}", "no number format 'fp4'; did you mean 'nvfp4' or 'mxfp4'"),
    ("roles: {aggregated: {engine: mock, expert_parallel: 0}}", "roles.aggregated.expert_parallel: must be >= 1, got 0"),
    ("roles: {aggregated: {engine: {args: {}}}}", "engine: must be a name, or a mapping with name"),
    ("roles: {aggregated: {engine: {name: vllm, tensor_parallel: 2}, tensor_parallel: 4}}", "tensor_parallel: is set in engine and"),
    ("roles: {aggregated: {engine: {name: vllm, tensor: 2}}}", "tensor"),
    ("roles: {aggregated: {engine: {name: vlm}}}", "there is no engine 'vlm'"),
    ("roles: {aggregated: {engine: 3}}", "engine"),
    ("roles: {aggregated: {engine: mock, adapters: [a, a]}}", "adapters: 'a' is named twice"),
    ("roles: {aggregated: {engine: mock, adapters: [-a]}}", "adapters: must be up to 128 letters"),
    ("roles: {aggregated: {engine: paged, adapters: [a]}}", "adapters: engine 'paged' runs none; run one that does: mock, openai, vllm, sglang"),
    ("roles: {aggregated: {engine: mock, adapters: [a, b, c], replicas: 2, adapters_per_worker: 1}}", "2 workers with 1 adapters each cannot have all 3"),
    # nodes
    (f"roles: {{aggregated: {{{WIDE}, engine: trtllm}}}}", "nodes: a worker of engine 'trtllm' is on one node, got 2; use mock, vllm or sglang, or"),
    (f"roles: {{aggregated: {{{WIDE}, tensor_parallel: 9}}}}", "nodes: 9 devices"),
    (f"roles: {{aggregated: {{{WIDE}, data_parallel: 2}}}}", "nodes: data-parallel ranks of one worker are on one node, got data_parallel 2"),
    (f"roles: {{aggregated: {{{WIDE}, engine: sglang, data_parallel: 8, expert_parallel: 8}}}}", "nodes: data-parallel ranks of one worker"),
    (f"roles: {{aggregated: {{{WIDE}, kv: {{host: 8GiB}}}}}}", "nodes: KV tiers (host) are of one node"),
    (f"roles: {{prefill: {{{WIDE}}}, decode: {{{WIDE}, nodes: 1}}}}", "prefill.nodes: a worker of engine 'vllm' over 2 nodes transfers no KV"),
    # KV between workers
    ("roles: {prefill: {}, decode: {}}\nworker: {kv_transfer: {transfer: {transports: [file, memory]}}}", "transports: file, memory cannot reach another worker's memory; name"),
    ("roles: {prefill: {}, decode: {}}\nworker: {kv_transfer: {transfer: {transports: [shmem]}}}", "there is no transport 'shmem'; did you mean 'shm'?"),
    ("roles: {prefill: {}, decode: {}}\nworker: {kv_transfer: {transfer: {listen: [memory]}}}", "transfer.listen: memory cannot be reached by other workers"),
    # hosts
    ("runtime: {hub: tcp://10.0.0.1:0}", "runtime.hub: must name a port"),
    ("runtime: {hub: 10.0.0.1:7400}", "expected tcp://HOST:PORT"),
    ("runtime: {hub: unix:///run/hub}", "must be tcp://HOST:PORT"),
    ("runtime: {listen: http://10.0.0.1:80}", "expected tcp://HOST:PORT"),
    ("runtime: {hub: tcp://a:1, join: tcp://b:1}", "hub tcp://a:1 and join tcp://b:1; leave one out"),
    ("runtime: {advertise: 10.0.0.5}", "set listen: tcp://0.0.0.0:0"),
    ("runtime: {listen: tcp://0.0.0.0:0, advertise: tcp://10.0.0.5:1}", "without a port"),
    ("runtime: {ports: 7500-7600}", "no effect without listen"),
    ("runtime: {listen: tcp://0.0.0.0:0, ports: '7500'}", "must be FIRST-LAST"),
    ("runtime: {listen: tcp://0.0.0.0:0, ports: 7600-7500}", "must be FIRST-LAST"),
    ("runtime: {listen: tcp://0.0.0.0:0, ports: 7500-70000}", "must be FIRST-LAST"),
    ("runtime: {listen: tcp://10.0.0.1:9, ports: 7500-7600}", "leave the port 0"),
    ("runtime: {tls: {certificate: c, key: k}}", "runtime.tls.authority: missing"),
    ("runtime: {tls: {certificate: c, key: '', authority: a}}", "must name a PEM file"),
    ("runtime: {namespace: a/b}", "must be up to 63 letters"),
    ("runtime: {joins: tcp://10.0.0.1:1}", "did you mean 'join'"),
    # registries and events
    ("runtime: {discovery: consul}", "must be one of 'local'"),
    ("runtime: {discovery: etcd}", "etcd needs urls, such as [http"),
    ("runtime: {urls: [http://etcd:2379]}", "no effect with discovery local"),
    ("runtime: {discovery: etcd, urls: [etcd:2379]}", "must be http://HOST:PORT, https"),
    ("runtime: {discovery: etcd, urls: [http://etcd], hub: tcp://a:1}", "leave them out"),
    ("runtime: {discovery: kubernetes, urls: [http://api]}", "no effect with discovery kubernetes"),
    ("runtime: {discovery: kubernetes, hub: tcp://a:1}", "leave them out"),
    ("runtime: {registry_credentials_file: account}", "no effect without urls"),
    ("runtime: {discovery: nats, urls: [nats://nats], event_credentials_file: account}", "registry_credentials_file counts for discovery nats"),
    ("runtime: {events: nats}", "needs event_urls"),
    ("runtime: {event_urls: [nats://10.0.0.1:4222]}", "has no effect with events direct"),
    ("runtime: {events: nats, event_urls: [http://10.0.0.1:2379]}", "has event_urls such as nats"),
    ("runtime: {events: nats, event_urls: [10.0.0.1:4222]}", "must be http"),
    # the planner
    ("planner: {max_workers: 2}\nroles: {aggregated: {replicas: 3}}", "replicas is 3, planner.max_workers 2 for aggregated"),
    ("planner: {min_workers: 3, max_workers: 2}", "min_workers is 3 and max_workers 2"),
    ("planner: {}\nroles: {aggregated: {}, prefill: {}}", "the roles are aggregated, prefill"),
    ("planner: {roles: {decode: {max_workers: 3}}}", "planner.roles.decode: there is no such role"),
    ("planner: {roles: {decod: {}}}", "planner.roles.decod: must be one of 'aggregated', 'prefill' or 'decode', got 'decod'"),
    ("planner: {budget: {gpus: 1}}\nroles: {prefill: {}, decode: {}}", "gpus is 1, and 1 decode and 1 prefill cost 2"),
    ("planner: {budget: {usd_per_hour: 5.0}, min_workers: 2}\nroles: {aggregated: {hardware: h100, engine: mock}}", "usd_per_hour is 5, and 2 aggregated cost 6"),
    ("planner: {}\nroles: {aggregated: {engine: openai, engine_args: {url: [http://127.0.0.1:1]}}}", "one worker for each url"),
    ("planner: {budget: {usd_per_hour: .nan}}", "finite"),
    ("planner: {cool_down_s: .inf}", "finite"),
    ("planner: {react_period_s: 0}", "react_period_s: must be >= 0.1"),
    ("planner: {max_worker: 3}", "did you mean 'max_workers'"),
    ("planner: {}\nslo: {ttft_s: .nan}", "slo.ttft_s: must be a finite number"),
    ("planner: {}\nruntime: {hub: tcp://10.0.0.1:7400}", "planner.address: runtime spans several hosts"),
    ("planner: {address: tcp://10.0.0.1:7410}", "planner.address: tcp://10.0.0.1:7410: all is on one host"),
    ("planner: {address: tcp://10.0.0.1:0}", "planner.address: must be tcp://HOST:PORT with a port"),
    ("planner: {address: unix:///run/planner}", "planner.address: must be tcp://HOST:PORT with a port"),
    ("planner: {address: 10.0.0.1}", "planner.address: "),
    ("planner: {address: tcp://10.0.0.1:7400}\nruntime: {hub: tcp://10.0.0.1:7400}", "planner.address: tcp://10.0.0.1:7400 is runtime.hub too"),
    ("planner: {address: tcp://10.0.0.1:7400}\nruntime: {join: tcp://10.0.0.1:7400}", "planner.address: tcp://10.0.0.1:7400 is runtime.join too"),
    # the rest
    ("supervision: {start_timeout_s: .inf}", "supervision.start_timeout_s: must be a finite number, got inf"),
    ("name: ../up", "name: must be up to 63 letters"),
]  # fmt: skip


def refusal(fields: dict) -> str:
    with pytest.raises(ConfigError) as refused:
        build({"model": "demo", **fields})
    return refused.value.message


@pytest.mark.parametrize(("text", "said"), REFUSED, ids=[text for text, _ in REFUSED])
def test_what_no_deployment_could_run_is_refused_in_one_line(text: str, said: str) -> None:
    message = refusal(yaml.safe_load(text))
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "urls",
    [
        ["nats://penstock:hidden@nats:4222"],
        ["nats://hidden@nats"],
        "nats://u:hidden@nats",
        ["nats://u:hidden@[nats"],
    ],
)
def test_urls_have_no_accounts_and_the_refusal_shows_none(urls: list[str] | str) -> None:
    wrong = {"discovery": "nats", "urls": urls}, {"events": "nats", "event_urls": urls}
    for fields, place in zip(wrong, ("REGISTRY", "EVENT"), strict=True):
        message = refusal({"runtime": fields})
        assert "user or password" in message
        assert f"PENSTOCK_{place}_CREDENTIALS" in message
        assert "hidden" not in message


def test_engine_args_have_bounds() -> None:
    def said(value: object) -> str:
        return refusal({"roles": {"aggregated": {"engine": "vllm", "engine_args": {"a": value}}}})

    deep: object = 1
    for _ in range(40):
        deep = [deep]
    wide: object = 1
    for _ in range(8):
        wide = [wide] * 9  # as YAML's anchors do
    assert "nested too deeply" in said(deep)
    assert "too many lists" in said(wide)
    assert "too many values" in said([[1] * 400] * 400)
