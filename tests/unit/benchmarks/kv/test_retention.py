"""What requests say of their KV reaches the pool, in virtual time, and a share bounds a neighbour."""

from benchmarks.eviction.replay import block_names
from benchmarks.kv.retention.replay import Case, Device
from benchmarks.kv.retention.workloads import AGENTS, CHATS, Ask
from penstock.kv.pool.use import PrefillPrice
from penstock.sim.workload.trace import PREFIX_BLOCK_TOKENS, TraceRow


def ask(at_s, blocks, *, group=AGENTS, session="s", follows_tool=False, is_last=False):
    row = TraceRow(at_s, len(blocks) * PREFIX_BLOCK_TOKENS, 1, tuple(blocks))
    return Ask(row, group, session, follows_tool, is_last, system=1)


def hits_of(case, asks, num_blocks=10):
    device = Device(num_blocks, case, PrefillPrice())
    hits = [device.ask(each, block_names(each.row.prefix_ids)) for each in asks]
    device.check()
    return hits


def flood(at_s, count=20):
    return [ask(at_s, [1000 + 10 * n, 1001 + 10 * n], group="one-shot") for n in range(count)]


def test_a_pin_outlasts_a_flood_until_its_ttl_is_over():
    turns = [ask(0, [1, 2]), *flood(1), ask(9, [1, 2, 3])]
    late = [ask(0, [1, 2]), *flood(11), ask(12, [1, 2, 3])]
    assert hits_of(Case("lru"), turns)[-1] == 0
    assert hits_of(Case("lru", pin_ttl_s=10), turns)[-1] == 2
    assert hits_of(Case("lru", pin_ttl_s=10), late)[-1] == 0


def test_a_priority_outlasts_a_flood_until_its_ttl_is_over():
    turns = [ask(0, [1, 2]), *flood(1), ask(9, [1, 2, 3])]
    late = [ask(0, [1, 2]), *flood(11), ask(12, [1, 2, 3])]
    assert hits_of(Case("lfu", priority_ttl_s=10), turns)[-1] == 2
    assert hits_of(Case("lfu", priority_ttl_s=10), late)[-1] == 0


def test_a_share_keeps_a_neighbours_flood_from_a_tenants_blocks():
    turns = [ask(0, [1, 2, 3], group=CHATS), *flood(1), ask(2, [1, 2, 3], group=CHATS)]
    assert hits_of(Case("lru"), turns)[-1] == 0
    assert hits_of(Case("lru", tenant_share=0.5), turns)[-1] == 3
