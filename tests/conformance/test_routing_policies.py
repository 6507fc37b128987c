from penstock.router.policies import make_policy
from penstock.testing.routing_policy import RoutingPolicySuite


class TestPredictedSeconds(RoutingPolicySuite):
    def make(self):
        return make_policy("kv")


class TestLeastLoaded(RoutingPolicySuite):
    def make(self):
        return make_policy("least-loaded")


class TestPowerOfTwo(RoutingPolicySuite):
    def make(self):
        return make_policy("power-of-two")


class TestRoundRobin(RoutingPolicySuite):
    def make(self):
        return make_policy("round-robin")


class TestRandom(RoutingPolicySuite):
    def make(self):
        return make_policy("random")


class TestSession(RoutingPolicySuite):
    def make(self):
        return make_policy("session")
