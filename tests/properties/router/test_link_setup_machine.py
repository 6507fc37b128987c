"""Charges for links against a ledger: whatever comes, no link costs requests more than one set-up before it is used."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.router.disagg import LinkCredit, LinkSetup
from penstock.router.policies import make_policy
from penstock.router.selector import WorkerSelector

SETUP_S = 2.0
slots = st.integers(0, 1)


class ColdLinksMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.num_slots = 2
        self.links = LinkSetup(self.num_slots, WorkerSelector(make_policy("kv")))
        self.setups_s = np.full(self.num_slots, SETUP_S)
        self.credit_s = {}  # model: by link, of those that are not used yet
        self.opened_s = {}  # model: by link
        self.warm = set()
        self.now_s = 0.0

    def charge_s(self, source, reader):
        if (source, reader) in self.warm:
            return 0.0
        opened_s = self.opened_s.get((source, reader))
        paid_s = self.credit_s.get((source, reader), 0.0) if opened_s is None else self.now_s - opened_s
        return max(SETUP_S - paid_s, 0.0)

    @rule(source=slots, reader=slots, worth_s=st.floats(0.01, 3.0))
    def ask(self, source, reader, worth_s):
        """A request to which a link is worth so much uses it, or does without."""
        charged = self.links.charge_s(source, self.setups_s, self.now_s)
        charge_s = 0.0 if charged is None else charged[reader]
        link = source, reader
        if worth_s > charge_s:
            self.links.open(source, reader, self.now_s)
            self.opened_s.setdefault(link, self.now_s)
            return
        self.links.credit_link(LinkCredit(source, reader, worth_s))
        if link not in self.opened_s:
            self.credit_s[link] = self.credit_s.get(link, 0.0) + worth_s
            assert self.credit_s[link] <= SETUP_S + 1e-9, "it should have been used"

    @rule(source=slots, reader=slots)
    def move(self, source, reader):
        self.links.moved(source, reader)
        self.warm.add((source, reader))
        self.opened_s[source, reader] = self.now_s

    @rule(seconds=st.floats(0.1, 3.0))
    def wait(self, seconds):
        self.now_s += seconds

    @rule(slot=slots)
    def leave(self, slot):
        self.links.forget(slot)
        self.warm = {link for link in self.warm if slot not in link}
        for ledger in (self.credit_s, self.opened_s):
            for link in [link for link in ledger if slot in link]:
                del ledger[link]

    @rule()
    def grow(self):
        if self.num_slots < 4:
            self.num_slots += 1
            self.links.grow(self.num_slots)
            self.setups_s = np.full(self.num_slots, SETUP_S)

    @invariant()
    def charges_are_what_the_ledger_says(self):
        self.links.check(self.num_slots)
        for source in range(2):
            charged = self.links.charge_s(source, self.setups_s, self.now_s)
            expected = [self.charge_s(source, reader) for reader in range(self.num_slots)]
            if charged is None:
                assert not any(expected)
            else:
                np.testing.assert_allclose(charged, expected, atol=1e-9)


TestColdLinks = ColdLinksMachine.TestCase
