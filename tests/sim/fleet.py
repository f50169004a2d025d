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

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.config import CoreConfig
from perdure.api.fingerprint import Fingerprint
from perdure.api.output import Stats
from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.api.scores import TokenScores
from perdure.coordinator import messages as m
from perdure.coordinator.coordinator import Coordinator
from perdure.coordinator.router import Routing
from tests.sim.oracle import PIECES, expected
from tests.sim.peers import CHECKED, MOST_DELAY_S, Peer, SimClient, SimReplica, Wire

MOST_S = 600.0
"""Of simulated time, in which a life must have ended."""
TICK_S = 0.05
MOST_REST_S = 60.0
NUM_REPLICAS, NUM_CLIENTS = 4, 3
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
        self.orders = rng.random() < 0.6
        self.pinning = rng.random() < 0.5
        self.bases = [[rng.randrange(len(PIECES)) for _ in range(max_len)] for _ in range(2)]
        for index in range(NUM_REPLICAS):
            self._start(index)
        self.clients = [SimClient(self, index) for index in range(NUM_CLIENTS)]
        self.back_at: list[tuple[float, Callable[[], None]]] = []
        self.next_epoch = 1
        self.num_broken = 0
        self.halted = False
        self.is_aborting = False
        """Whether a pause that aborts is on its way, or may be: it ends also what is submitted before it gets there."""
        self.halted_until = 0.0

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
        rng = self.rng
        to_submit = rng.randint(3, 11)
        while self.wire.now < MOST_S:
            self.wire.now += TICK_S if self.wire.lossy else TICK_S / 4
            for when, back in list(self.back_at):
                if self.wire.now >= when:
                    self.back_at.remove((when, back))
                    back()
            if to_submit and rng.random() < 0.4:
                to_submit -= 1
                self._submit(rng.choice(self.clients))
            roll = rng.random()
            if roll < 0.02:
                self._abort()
            elif roll < 0.05:
                self._take_checkpoint()
            elif roll < 0.09 and self.orders:
                self._give_order()
            elif roll < 0.1 and self.pinning:
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
            if self._lacks_weights and rng.random() < 0.1:
                self._give_weights()
            if not to_submit and not any(client.num_open or client.asked for client in self.clients):
                break
            if not to_submit and self.halted and self.wire.now > self.halted_until and rng.random() < 0.2:
                self._resume()
        else:
            raise AssertionError(f"after {MOST_S} s requests are still alive, or orders unanswered")
        self._judge()

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

    def _submit(self, client: SimClient) -> None:
        rng, config = self.rng, self.config
        ticket = client.ticket()
        if self.is_aborting:
            client.aborted.add(ticket)
        if client.taken and rng.random() < 0.2:
            _, checkpoint = rng.choice(client.taken)
            request = checkpoint.as_request(ticket, ticket, stream=rng.random() < 0.5)
            client.went_on[ticket] = checkpoint
            client.requests[ticket] = request
            client.send(cmd.Submit(request, Checkpoint.from_bytes(checkpoint.to_bytes())))
            return
        length = rng.randint(1, max(1, config.max_num_tokens * 2 // 3))
        shared = rng.randint(0, length)
        base = rng.choice(self.bases)
        prompt = base[:shared] + [rng.randrange(config.vocab_size) for _ in range(length - shared)]
        if rng.random() < 0.05:
            prompt = rng.choice(([], [config.vocab_size], prompt + [1] * config.max_num_tokens))
            client.must_refuse.add(ticket)
        request = Request(rng.randint(0, 5), ticket, prompt, self._params(), stream=rng.random() < 0.5)
        client.requests[ticket] = request
        client.send(cmd.Submit(request))

    def _params(self) -> SamplingParams:
        rng, vocab = self.rng, self.config.vocab_size
        ids = lambda most: [rng.randrange(vocab) for _ in range(rng.randint(1, most))]  # noqa: E731
        max_tokens = rng.choice((None, None, None, 0, 1, 8, 20))
        return SamplingParams(
            max_tokens=max_tokens,
            n=1 if max_tokens == 0 else rng.choice((1, 1, 1, 2, 3)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.choice((None, rng.randrange(2**64))),
            stop=[rng.choice(("bca", "aab", "da", "ee", "cabc", "g"))] if rng.random() < 0.2 else [],
            stop_token_ids=ids(1) if rng.random() < 0.2 else [],
            stop_token_sequences=[ids(3) for _ in range(2)] if rng.random() < 0.3 else [],
            ignore_eos=rng.random() < 0.3,
            repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.3)),
            logprob_token_ids=ids(2) if rng.random() < 0.1 else None,
            logprobs=rng.choice((None, None, 0, 2, -1)),
            prompt_logprobs=rng.choice((None, None, None, 0, 2)),
        )

    def _abort(self) -> None:
        client = self.rng.choice(self.clients)
        if self.rng.random() < 0.2:
            client.aborted |= set(client.requests)
            client.send(cmd.Abort(everything=True))
        elif client.next_ticket:
            ticket = self.rng.randrange(client.next_ticket)
            client.aborted.add(ticket)
            client.send(cmd.Abort(tickets=[ticket]))

    def _take_checkpoint(self) -> None:
        client = self.rng.choice(self.clients)
        live = [ticket for ticket in client.requests if ticket not in client.ended and ticket not in client.refused]
        if live:
            end = self.rng.random() < 0.3
            ticket = self.rng.choice(live)
            if end:
                client.aborted.add(ticket)
            client.send(cmd.TakeCheckpoint(client.ticket(), request_ticket=ticket, end=end))

    def _give_order(self) -> None:
        rng, client = self.rng, self.clients[0]
        if client.asked:
            return
        kind = rng.choice(("pause", "suspend", "resume", "resume", "update", "update", "missing", "reset", "stats"))
        match kind:
            case "pause":
                self.halted = True
                self.halted_until = self.wire.now + rng.choice((0.0, 0.0, 2 * self.routing.stall_s))
                mode: cmd.PauseMode = rng.choice(("keep", "wait", "abort"))
                client.send(cmd.Pause(client.ticket(), mode))
                if mode == "abort":
                    self.is_aborting = True
                    for one in self.clients:
                        one.aborted |= set(one.requests)
            case "suspend":
                self.halted = True
                client.send(cmd.Suspend(client.ticket(), rng.choice(("persist", "offload", "recompute"))))
            case "resume":
                self._resume()
            case "update":
                self._give_weights()
            case "missing":
                client.send(cmd.UpdateWeights(client.ticket(), None, True), source="missing")
            case "reset":
                client.send(cmd.Reset(client.ticket()))
            case "stats":
                client.send(cmd.GetStats(client.ticket()))

    @property
    def _lacks_weights(self) -> bool:
        """Whether somebody cannot serve, as those who had the agreed weights are gone."""
        return self.coordinator is not None and any(r.lacks_weights for r in self.coordinator.router.members.all)

    def _give_weights(self) -> None:
        """From a file, or as tensors."""
        client = self.clients[0]
        if client.asked:
            return
        self.next_epoch += 1
        number = str(weights_of(self.next_epoch))
        source = f"{m.OF_TENSORS}{number}-{self.next_epoch}" if self.rng.random() < 0.5 else number
        self.marks["weights given again"] += self._lacks_weights
        client.send(cmd.UpdateWeights(client.ticket(), self.next_epoch, True), source=source)

    def _resume(self) -> None:
        client = self.clients[0]
        if not client.asked or self.rng.random() < 0.2:
            client.send(cmd.Resume(client.ticket()))

    def answered(self, order: cmd.Command, done: ev.Done) -> None:
        kind = type(order).__name__
        self.marks[f"{kind} {'done' if done.failure is None else done.failure.kind}"] += 1
        if isinstance(order, cmd.Resume) and done.failure is None:
            self.halted = False
        if isinstance(order, cmd.Pause) and order.mode == "abort" and done.failure is None:
            self.is_aborting = False
        if isinstance(order, cmd.GetStats) and done.failure is None:
            assert isinstance(done.value, Stats) and done.value.num_running >= 0

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

    # Judgement

    def _judge(self) -> None:
        self._drain()
        for client in self.clients:
            assert not client.submissions._live and not client.submissions._asked
            for ticket, request in client.requests.items():
                if ticket in client.refused:
                    self._judge_refusal(client, ticket)
                elif ticket in client.must_refuse:  # it ended before a replica saw it
                    record = client.ended[ticket]
                    assert record.finish_reason in ("abort", "error") and not record.token_ids
                else:
                    for child in range(request.params.n):
                        self._judge_record(client, ticket, request, client.records[ticket, child])
            for ticket, checkpoint in client.taken:
                if ticket in client.ended:
                    self._judge_checkpoint(client, ticket, checkpoint)

    def _judge_checkpoint(self, client: SimClient, ticket: int, checkpoint: Checkpoint) -> None:
        listed = checkpoint.params.logprob_token_ids
        for child, sample in enumerate(checkpoint.samples):
            record, count = client.records[ticket, child], sample.num_output
            assert sample.token_ids == record.token_ids[:count]
            self.marks["checkpoints with ended children"] += sample.ending is not None
            if sample.scores is not None and record.scores is not None:
                scores = TokenScores.unpack(sample.scores, sample.token_ids, listed_ids=listed)
                assert scores == record.scores.cut(0, count)

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
                return self._check_rest()
            except AssertionError:
                if self.wire.now > give_up_at:
                    raise
            if self._lacks_weights and self.rng.random() < 0.1:
                self._give_weights()
            self.wire.now += TICK_S
            self._step()

    def _check_rest(self) -> None:
        assert self.coordinator is not None
        serving = self.coordinator.router.members.serving
        assert len(serving) == len(self.replicas) == NUM_REPLICAS, "a replica was not let in"
        assert not any(client.asked or client.num_open for client in self.clients), "a client waits"
        self.coordinator.check_idle()
        for replica in self.replicas.values():
            replica.bridge.check_idle()
            assert not replica.prepared and not replica.taking, "an order that nobody decides is left at a replica"
            assert replica.scheduler.num_live == 0, "a request is left at a replica"
            stats = replica.scheduler.stats()
            assert stats.num_free_pages == stats.num_pages, "pages are lost"
            replica.scheduler.check()
        epochs = {replica.scheduler.stats().weight_epoch for replica in self.replicas.values()}
        states = {replica.scheduler.stats().state for replica in self.replicas.values()}
        weights = {replica.device.weights for replica in self.replicas.values()}
        assert len(epochs) == len(states) == len(weights) == 1, (epochs, states, weights)

    def _judge_refusal(self, client: SimClient, ticket: int) -> None:
        kind = client.refused[ticket].kind
        self.marks[f"refused {kind}"] += 1
        assert ticket in client.must_refuse or kind == "StateError", client.refused[ticket]

    def _judge_record(self, client: SimClient, ticket: int, request: Request, record: ev.Record) -> None:
        reason = record.finish_reason
        self.marks[f"{reason} after {min(record.num_checkpoints, 3)} moves"] += 1
        self.marks["children moved"] += request.params.n > 1 and record.num_checkpoints > 0
        if reason == "error":
            assert record.failure is not None and record.failure.kind == "ReplicaLost", record.failure
            assert self.killers or self.restarts or self.wire.lossy
        if reason == "abort":
            assert ticket in client.aborted
        epochs = list(record.weight_epochs)
        assert bool(epochs) == bool(record.token_ids)
        firsts = [first for first, _ in epochs]
        assert firsts == sorted({*firsts}) and (not firsts or firsts[0] == 0)

        def weights_at(index: int) -> int:
            if not epochs:
                return 0
            return weights_of([epoch for first, epoch in epochs if first <= index][-1])

        truth = expected(request, record.seed, self.config, weights_at, record.child)
        count = len(record.token_ids)
        assert record.token_ids == truth.token_ids[:count], (request, record.token_ids, truth.token_ids)
        if reason in ("stop", "length"):
            assert count == len(truth.token_ids) and reason == truth.reason
            found = None if record.stop is None else (record.stop.reason, *_of(record.stop))
            assert found == truth.stop
        ids, log = client.parts.get((ticket, record.child), ([], None))
        assert ids == record.token_ids[: len(ids)] and (request.stream or not ids)
        assert record.request_id == request.request_id and record.prompt_token_ids == request.prompt_token_ids
        assert (record.scores is not None) == request.params.asks_scores
        if record.scores is not None:
            assert record.scores.num_scored == count
            assert list(record.scores.chosen) == [chosen for chosen, _, _ in truth.scores[:count]]
            width = len(request.params.logprob_token_ids or ())
            assert record.scores.listed_scores.tolist() == truth.listed[: count * width]
            assert log is None or log == record.scores.cut(0, len(ids))
        has_prompt_scores = record is client.ended[ticket] and request.params.prompt_logprobs is not None
        assert (record.prompt_scores is not None) == has_prompt_scores
        if record.prompt_scores is not None and (count or reason in ("stop", "length")):
            chosen = list(record.prompt_scores.chosen)
            assert len(chosen) == len(request.prompt_token_ids) - 1
            assert self.next_epoch > 1 or chosen == [one for one, _, _ in truth.prompt_scores], "prompt scores"
        if not record.exact:
            assert self.next_epoch > 1, "only other weights are inexact here"
            self.marks["inexact"] += 1


def weights_of(epoch: int) -> int:
    """An epoch names its weights."""
    return epoch % 5 if epoch else 0


def _of(stop: ev.StopMatch) -> tuple[int, int, int | None]:
    return stop.num_tokens, stop.num_matched, stop.text_end


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
