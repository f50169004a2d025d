"""The fleet's simulation can fail: each of these faults, planted into a copy of the package, is caught, and soon."""

from pathlib import Path

import pytest

from tests.sim.planting import check_caught

FAULTS = {
    "a_message_taken_twice": (
        "coordinator/link.py",
        "if number <= self._received or number > self._received + WINDOW:",
        "if number <= self._received:\n            return [(packet.message, frames)]\n"
        "        if number > self._received + WINDOW:",
    ),
    "a_session_of_long_ago_taken_for_new": (
        "coordinator/sessions.py",
        "if peer is None or peer.link.caller != packet.caller:",
        "peer = peer or (next(iter(self._peers.values())) if self._peers else None)\n        if peer is None:",
    ),
    "a_lost_replica_that_keeps_its_requests": (
        "coordinator/router.py",
        "        self.orders.leave(replica)\n        self._go_on_elsewhere(replica, now)",
        "        self.orders.leave(replica)",
    ),
    "a_replica_that_sends_what_is_known": (
        "engine/bridge.py",
        "fresh = max(0, here.num_sent[child] - first)",
        "fresh = 0",
    ),
    "a_seed_resolved_twice": (
        "engine/going_on.py",
        "        seed=known.seed,",
        "        seed=known.seed + 1,",
    ),
    "a_retired_entry_that_its_client_keeps": (
        "coordinator/entries.py",
        "        if entry.client is not None:\n            self.orphan(entry)\n        del self._by_serial",
        "        del self._by_serial",
    ),
    "one_that_joins_before_it_is_in_line": (
        "coordinator/orders.py",
        "        if not rounds:\n            self._let_in(replica)",
        "        if True:\n            self._let_in(replica)",
    ),
    "one_that_is_paused_taken_for_hanging": (
        "coordinator/membership.py",
        "if beat.num_steps != self._num_steps or not beat.has_work:",
        "if beat.num_steps != self._num_steps:",
    ),
    "requests_sent_between_prepare_and_apply": (
        "coordinator/orders.py",
        "return self._preparing is not None or bool(self._queue)",
        "return False",
    ),
    "a_client_that_goes_and_leaves_its_pins": (
        "coordinator/orders.py",
        "            if pin.client is not None and pin.client[0] == client:\n                self._release(number)",
        "            pass",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name: str, tmp_path: Path) -> None:
    file, right, wrong = FAULTS[name]
    check_caught(tmp_path, file, right, wrong, "fleet", "--count", "100")
