import random

from penstock.kv.pool.eviction import Lru
from penstock.testing.eviction import EvictionPolicySuite


class TestLru(EvictionPolicySuite):
    def make(self):
        return Lru()


class Anything:
    def __init__(self):
        self.random = random.Random(0)

    def victims(self, candidates, count):
        return self.random.sample(list(candidates), count)


class TestAnything(EvictionPolicySuite):
    def make(self):
        return Anything()
