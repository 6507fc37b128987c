"""OpenTelemetry: a real collector gets the spans of one request from all processes, in one trace with the client's span above."""

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.collector import Collector

pytestmark = pytest.mark.slow
collected = pytest.mark.needs("collector clients")

TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ROLE = {"replicas": 1, "engine": "mock", "kv_blocks": 400, "mock": {"kv_bytes_per_block": 4096}}
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}


def attributes_of(span):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@collected
def test_a_collector_gets_one_trace_of_frontend_router_workers_and_kv_transfer(deploy, tmp_path):
    with Collector(tmp_path) as collector:

        async def scenario(site):
            headers = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01", "X-Request-Id": "mine"}
            await site.tell("tell me about rivers " * 20, max_tokens=6, extra_headers=headers)

            async def all_there():
                return len(collector.spans) >= 10

            await site.until(all_there, timeout_s=90)

        deploy(
            scenario,
            timeout_s=180,
            roles={"prefill": ROLE, "decode": ROLE},
            router=ALWAYS,
            tracing={"endpoint": collector.url},
        )
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    (server,) = collector.named("POST /v1/chat/completions")
    assert server.parent_span_id.hex() == CLIENT_SPAN
    assert server.kind == Span.SPAN_KIND_SERVER
    told = attributes_of(server)
    assert (told["http.response.status_code"], told["gen_ai.usage.output_tokens"]) == (200, 6)
    assert told["penstock.ttft_s"] > 0
    assert collector.services[server.span_id] == "penstock-frontend"
    (router,) = collector.named("router")
    assert attributes_of(router)["penstock.prefill_worker"] == "prefill-1"
    assert attributes_of(router)["penstock.worker"] == "decode-1"
    workers = sorted(collector.named("worker"), key=lambda span: span.start_time_unix_nano)
    assert [attributes_of(span)["penstock.prefill_only"] for span in workers] == [True, False]
    assert {collector.services[span.span_id] for span in workers} == {"penstock-worker"}
    (transfer,) = collector.named("kv_transfer")
    assert transfer.status.code == Status.STATUS_CODE_UNSET
    assert attributes_of(transfer)["penstock.kv_tokens"] > 50
    (decode,) = collector.named("decode")
    assert decode.parent_span_id == workers[1].span_id
    within = [
        router,
        transfer,
        *workers,
        *collector.named("send to prefill-1"),
        *collector.named("send to decode-1"),
    ]
    assert len(within) == 6
    for span in within:
        assert span.parent_span_id == server.span_id, span.name
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert abs(span.start_time_unix_nano - server.start_time_unix_nano) < 60e9


def test_a_collector_that_is_away_harms_no_request(deploy):
    async def scenario(site):
        for _ in range(5):
            _, usage = await site.tell("hello", max_tokens=4)
            assert usage.completion_tokens == 4

    deploy(scenario, timeout_s=180, tracing={"endpoint": "http://127.0.0.1:9"})
