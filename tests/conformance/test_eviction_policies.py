"""Every eviction policy, native and in Python."""

from typing import get_args

import pytest

from penstock.kv.eviction import EvictionPolicy
from penstock.testing.eviction import EvictionPolicySuite


@pytest.mark.parametrize("in_python", [False, True], ids=["native", "reference"])
@pytest.mark.parametrize("policy", get_args(EvictionPolicy))
class TestPolicies(EvictionPolicySuite):
    @pytest.fixture(autouse=True)
    def choose(self, policy, in_python):
        self.policy, self.in_python = policy, in_python
