"""One simulated life of a fleet: a coordinator, clients and replicas over a wire that is worse than any real one.

Replicas are the real loop and core on fake devices; they die, hang, and return. One thread, one seed, and a clock that
only this file moves. Every request must have exactly one end, equal to its one-request oracle whatever it went through.

    python -m tests.sim.fleet --first 0 --count 1000
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from perdure.api.config import CoreConfig
from perdure.api.fingerprint import Fingerprint
from perdure.coordinator import messages as m
from perdure.coordinator.coordinator import Coordinator
from perdure.coordinator.router import Routing
from tests.sim.fleet_judge import check_rest, judge
from tests.sim.fleet_traffic import Traffic
from tests.sim.oracle import PIECES
from tests.sim.peers import CHECKED, MOST_DELAY_S, NUM_REPLICAS, Peer, SimClient, SimReplica, Wire

MOST_S = 600.0
"""Of simulated time, in which a life must have ended."""
TICK_S = 0.05
MOST_REST_S = 60.0
NUM_CLIENTS = 3
MOST_BROKEN = 8


class Fleet:
    """Everything random comes from one seed."""

    def __init__(self, seed: int, marks: Counter[str]) -> None:
        self.rng = rng = random.Random(f"fleet {seed}")
        self.marks = marks
        self._numbers = itertools.count(1)
        self.connections = itertools.count(1)
        self.peers: dict[str, Peer] = {}
        """Whoever is there, by the address of its connection."""
        self.wire = Wire(rng, lossy=rng.choice((0.0, 0.02, 0.1, 0.25)))
        max_len = rng.choice((16, 24, 40))
        page_size = rng.choice((1, 2, 4, 8))
        self.config = CoreConfig(
            num_pages=max(1, rng.choice((4, 6, 10)) * max_len // 4 // page_size),
            page_size=page_size,
            max_model_len=max_len,
            max_num_seqs=6,
            max_num_batched_tokens=16,
            vocab_size=len(PIECES),
            end_token_ids=(0,) if rng.random() < 0.5 else (),
            seed=rng.randrange(5),
            fingerprint=Fingerprint(weights="0"),
        )
        self.routing = Routing(
            policy=rng.choice(("round_robin", "load_balanced", "longest_prefix", "first_prefix_block")),
            alpha=rng.choice((0.0, 0.5, 100.0)),
            affinity_ttl=rng.choice((0.0, 1.0, 300.0)),
            on_replica_loss="resume" if rng.random() < 0.8 else "fail",
            replica_wait_s=rng.choice((2.0, 30.0, MOST_S)),
            blocking_collectives=rng.random() < 0.5,
            silence_s=rng.choice((1.2, 2.0)),
            stall_s=2.0,
        )
        self.tells_cuts = rng.random() < 0.7
        """Whether one is told of connections that broke."""
        self._coordinator_at = 0.0
        self.coordinator: Coordinator | None = self._new_coordinator()
        self.replicas: dict[int, SimReplica] = {}
        self.killers = rng.random() < 0.7
        self.restarts = rng.random() < 0.3
        self.traffic = Traffic(self, max_len, len(PIECES))
        for index in range(NUM_REPLICAS):
            self._start(index)
        self.clients = [SimClient(self, index) for index in range(NUM_CLIENTS)]
        self.back_at: list[tuple[float, Callable[[], None]]] = []
        self.num_broken = 0

    def number(self) -> int:
        """Never used before; some large."""
        return next(self._numbers) * 2**32 + self.rng.randrange(2**32)

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(self.routing, self.number, self.wire.now)

    def _start(self, index: int) -> None:
        rng = self.rng
        config = replace(
            self.config,
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.choice((1, 3, 7, 16, 64)),
            paused_pages=rng.randint(0, self.config.num_pages),
            enable_prefix_caching=rng.random() < 0.8,
            replica=index,
        )
        self.replicas[index] = SimReplica(self, index, config)

    # Traffic

    def run(self) -> None:
        rng, traffic = self.rng, self.traffic
        to_submit = rng.randint(3, 11)
        while self.wire.now < MOST_S:
            self.wire.now += TICK_S if self.wire.lossy else TICK_S / 4
            for when, back in list(self.back_at):
                if self.wire.now >= when:
                    self.back_at.remove((when, back))
                    back()
            if to_submit and rng.random() < 0.4:
                to_submit -= 1
                traffic.submit(rng.choice(self.clients))
            roll = rng.random()
            if roll < 0.02:
                traffic.abort()
            elif roll < 0.05:
                traffic.take_checkpoint()
            elif roll < 0.09 and traffic.gives_orders:
                traffic.give_order()
            elif roll < 0.1 and traffic.pins:
                rng.choice(self.clients).pin_or_release()
            elif roll < 0.14 and self.killers and self.num_broken < MOST_BROKEN:
                self._break_replica()
            elif 0.15 <= roll < 0.165 and self.restarts and to_submit:
                self._restart_coordinator()
            elif 0.14 <= roll < 0.15 and self.wire.lossy:
                rng.choice(list(self.peers.values())).connect()
                self.marks["connected anew"] += 1
            elif 0.165 <= roll < 0.18 and self.killers:
                self._hang(rng.choice(self.clients))
                self.marks["client hung"] += 1
            self._step()
            if traffic.lacks_weights and rng.random() < 0.1:
                traffic.give_weights()
            if not to_submit and not any(client.num_open or client.asked for client in self.clients):
                break
            if not to_submit and traffic.halted and self.wire.now > traffic.halted_until and rng.random() < 0.2:
                traffic.resume()
        else:
            raise AssertionError(f"after {MOST_S} s requests are still alive, or orders unanswered")
        self._drain()
        judge(self)

    def _step(self) -> None:
        now = self.wire.now
        for source, target, frames in self.wire.arrived():
            self._deliver(source, target, frames)
        if self.coordinator is not None and now >= self._coordinator_at:
            self._step_coordinator(self.coordinator, now)
        for peer in list(self.peers.values()):
            if now >= peer.wake_at and not peer.is_hung:
                peer.step()

    def _step_coordinator(self, coordinator: Coordinator, now: float) -> None:
        coordinator.tick(now)
        if self.rng.random() < CHECKED:
            coordinator.router.entries.check()
        for address, frames in coordinator.packets(now):
            target = address.decode()
            if target in self.peers:
                self.wire.send("coordinator", target, frames)
            elif self.tells_cuts:
                coordinator.cut(address, now)
        self._coordinator_at = coordinator.due(now)

    def _deliver(self, source: str, target: str, frames: list[bytes]) -> None:
        if target == "coordinator":
            if self.coordinator is not None:
                self.coordinator.take(source.encode(), frames, self.wire.now)
                self._coordinator_at = 0.0
        elif (peer := self.peers.get(target)) is not None and not peer.is_hung:
            peer.take(frames)
            peer.wake_at = 0.0

    def _break_replica(self) -> None:
        """Kill one, hang one, or have one leave; most come back."""
        rng = self.rng
        alive = [index for index, replica in self.replicas.items() if not replica.is_hung]
        if not alive:
            return
        self.num_broken += 1
        busy = [index for index in alive if self.replicas[index].scheduler.stats().num_running]
        index = rng.choice(busy or alive)
        replica = self.replicas[index]
        if replica.bridge._here:
            self.marks["lost with requests"] += 1
        if rng.random() < 0.3:
            self._hang(replica)
            self.marks["hung"] += 1
            return
        if rng.random() < 0.3 and replica.caller.link is not None:
            replica.caller.send(m.Leave())
            replica.step()
            self.marks["left"] += 1
        del self.replicas[index], self.peers[replica.address]
        self.marks["killed"] += 1
        self.back_at.append((self.wire.now + rng.uniform(0.1, 2.5), lambda: self._start(index)))

    def _hang(self, peer: Peer) -> None:
        peer.is_hung = True

        def wake() -> None:
            peer.is_hung = False

        self.back_at.append((self.wire.now + self.rng.uniform(0.1, 3.5), wake))

    def _restart_coordinator(self) -> None:
        if self.coordinator is None:
            return
        self.coordinator = None
        self.marks["coordinator restarts"] += 1

        def again() -> None:
            self.coordinator, self._coordinator_at = self._new_coordinator(), 0.0

        self.back_at.append((self.wire.now + self.rng.uniform(0.0, 2.0), again))

    # The end

    def _drain(self) -> None:
        """Everybody is back. Let everything come to rest: then nothing is left anywhere, and so it stays."""
        for _, back in self.back_at:
            back()
        self.back_at.clear()
        for client in self.clients:
            for pin in list(client.pins):
                client.release(pin)
        self._come_to_rest()
        for _ in range(round(MOST_DELAY_S / TICK_S) + 1):  # what is still under way belongs to nobody
            self.wire.now += TICK_S
            self._step()
        self._come_to_rest()  # again: such a wire may cost a session at any time
        assert self.coordinator is not None
        router = self.coordinator.router
        self.marks["requests moved"] += router.num_moved
        for kind, count in router.orders.num_calls.items():
            self.marks[f"calls {kind}"] += count
        if not (self.killers or self.wire.lossy):
            assert not router.num_lost_replicas, "nobody died, and somebody was lost"

    def _come_to_rest(self) -> None:
        give_up_at = self.wire.now + MOST_REST_S
        while True:
            try:
                return check_rest(self)
            except AssertionError:
                if self.wire.now > give_up_at:
                    raise
            if self.traffic.lacks_weights and self.rng.random() < 0.1:
                self.traffic.give_weights()
            self.wire.now += TICK_S
            self._step()


def run_fleets(first: int, count: int) -> Counter[str]:
    """Run these seeds; the first failure names its seed and how to replay it."""
    marks: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            Fleet(seed, marks).run()
        except Exception as error:
            again = f"python -m tests.sim.fleet --first {seed} --count 1"
            raise AssertionError(f"the fleet's life with seed {seed} failed; replay: {again}") from error
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args()
    marks = run_fleets(args.first, args.count)
    print(f"{args.count} fleets, every request one end, all equal the oracle")
    for name, number in sorted(marks.items()):
        print(f"  {name}: {number}")


if __name__ == "__main__":
    sys.exit(main())
