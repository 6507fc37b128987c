import asyncio
import random

from penstock.sim.loop import run
from penstock.sim.network import NetworkConfig, Pipe, SimNetwork


class Ends:
    """Lets a pipe follow the path between two hosts."""

    def __init__(self, pipe):
        self.pipe = pipe
        self.ends = ("a", "b")

    def on_path(self, *, is_open):
        self.pipe.set_open(is_open=is_open)


def arrivals(config, sends, faults=(), seed=0):
    """Send (at_s, bytes) over one pipe; gives (number, arrived_s)."""

    async def main(rng: random.Random):
        loop = asyncio.get_running_loop()
        network = SimNetwork(rng, config)
        pipe = Pipe(network, ("a", "b"))
        network.add(Ends(pipe))
        got = []
        for number, (at_s, num_bytes) in enumerate(sends):
            loop.call_at(at_s, pipe.send, num_bytes, lambda n: got.append((n, loop.time())), number)
        for at_s, name in faults:
            loop.call_at(at_s, getattr(network, name), "a", "b")
        await asyncio.sleep(100)
        network.check_at_rest()
        return got

    return run(main, seed)


def test_a_message_takes_latency_and_its_bytes_over_bandwidth_one_after_the_other():
    config = NetworkConfig(latency_s=1.0, bandwidth_bytes_per_s=10.0)
    assert arrivals(config, [(0.0, 20), (0.5, 10), (9.0, 0)]) == [(0, 3.0), (1, 4.0), (2, 10.0)]


def test_jitter_keeps_the_order_and_comes_from_the_seed():
    config = NetworkConfig(latency_s=0.1, jitter_s=5.0)
    sends = [(0.1 * number, 1) for number in range(50)]
    got = arrivals(config, sends, seed=1)
    assert [number for number, _ in got] == list(range(50))
    assert [at_s for _, at_s in got] == sorted(at_s for _, at_s in got)
    assert got == arrivals(config, sends, seed=1) != arrivals(config, sends, seed=2)


def test_what_is_sent_over_a_cut_path_waits():
    config = NetworkConfig(latency_s=1.0)
    faults = [(0.5, "cut"), (2.0, "cut"), (3.0, "mend"), (7.0, "mend")]
    assert arrivals(config, [(0.0, 0), (4.0, 0), (6.5, 0)], faults) == [(0, 7.0), (1, 7.0), (2, 7.5)]


def test_nothing_is_delivered_to_an_end_that_has_gone():
    async def main(rng: random.Random):
        pipe = Pipe(SimNetwork(rng, NetworkConfig(latency_s=1.0)), ("a", "b"))
        got = []

        def leave() -> None:
            pipe.is_deaf = True

        for call, *args in ((got.append, 1), (leave,), (got.append, 2)):
            pipe.send(0, call, *args)
        await asyncio.sleep(5)
        return got

    assert run(main, 0) == [1]


def test_what_is_sent_in_one_moment_arrives_together_once_all_of_it_has():
    config = NetworkConfig(latency_s=1.0, bandwidth_bytes_per_s=10.0)
    assert arrivals(config, [(0.0, 5), (0.0, 5), (0.5, 10)]) == [(0, 2.0), (1, 2.0), (2, 3.0)]
