"""What the clients of a simulated fleet ask for: requests, aborts, checkpoints, and orders for all replicas.

An epoch names its weights, and every update has an epoch of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.output import Stats
from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.coordinator import messages as m
from tests.sim.peers import SimClient

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet


class Traffic:
    """Everything random is the fleet's. halted: whether somebody paused or suspended it, until when at least."""

    def __init__(self, fleet: Fleet, max_len: int, num_ids: int) -> None:
        self.fleet = fleet
        self.rng = rng = fleet.rng
        self.gives_orders = rng.random() < 0.6
        self.pins = rng.random() < 0.5
        self.bases = [[rng.randrange(num_ids) for _ in range(max_len)] for _ in range(2)]
        self.next_epoch = 1
        self.halted = False
        self.halted_until = 0.0
        self.is_aborting = False
        """Whether a pause that aborts is on its way, or may be: it ends also what is submitted before it gets there."""

    def submit(self, client: SimClient) -> None:
        rng, config = self.rng, self.fleet.config
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
        rng, vocab = self.rng, self.fleet.config.vocab_size
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

    def abort(self) -> None:
        client = self.rng.choice(self.fleet.clients)
        if self.rng.random() < 0.2:
            client.aborted |= set(client.requests)
            client.send(cmd.Abort(everything=True))
        elif client.next_ticket:
            ticket = self.rng.randrange(client.next_ticket)
            client.aborted.add(ticket)
            client.send(cmd.Abort(tickets=[ticket]))

    def take_checkpoint(self) -> None:
        client = self.rng.choice(self.fleet.clients)
        live = [ticket for ticket in client.requests if ticket not in client.ended and ticket not in client.refused]
        if live:
            end = self.rng.random() < 0.3
            ticket = self.rng.choice(live)
            if end:
                client.aborted.add(ticket)
            client.send(cmd.TakeCheckpoint(client.ticket(), request_ticket=ticket, end=end))

    def give_order(self) -> None:
        rng, client = self.rng, self.fleet.clients[0]
        if client.asked:
            return
        kind = rng.choice(("pause", "suspend", "resume", "resume", "update", "update", "missing", "reset", "stats"))
        match kind:
            case "pause":
                self.halted = True
                self.halted_until = self.fleet.wire.now + rng.choice((0.0, 0.0, 2 * self.fleet.routing.stall_s))
                mode: cmd.PauseMode = rng.choice(("keep", "wait", "abort"))
                client.send(cmd.Pause(client.ticket(), mode))
                if mode == "abort":
                    self.is_aborting = True
                    for one in self.fleet.clients:
                        one.aborted |= set(one.requests)
            case "suspend":
                self.halted = True
                client.send(cmd.Suspend(client.ticket(), rng.choice(("persist", "offload", "recompute"))))
            case "resume":
                self.resume()
            case "update":
                self.give_weights()
            case "missing":
                client.send(cmd.UpdateWeights(client.ticket(), None, True), source="missing")
            case "reset":
                client.send(cmd.Reset(client.ticket()))
            case "stats":
                client.send(cmd.GetStats(client.ticket()))

    @property
    def lacks_weights(self) -> bool:
        """Whether somebody cannot serve, as those who had the agreed weights are gone."""
        return self.fleet.coordinator is not None and any(
            r.lacks_weights for r in self.fleet.coordinator.router.members.all
        )

    def give_weights(self) -> None:
        """From a file, or as tensors."""
        client = self.fleet.clients[0]
        if client.asked:
            return
        self.next_epoch += 1
        number = str(weights_of(self.next_epoch))
        source = f"{m.OF_TENSORS}{number}-{self.next_epoch}" if self.rng.random() < 0.5 else number
        self.fleet.marks["weights given again"] += self.lacks_weights
        client.send(cmd.UpdateWeights(client.ticket(), self.next_epoch, True), source=source)

    def resume(self) -> None:
        client = self.fleet.clients[0]
        if not client.asked or self.rng.random() < 0.2:
            client.send(cmd.Resume(client.ticket()))

    def answered(self, order: cmd.Command, done: ev.Done) -> None:
        kind = type(order).__name__
        self.fleet.marks[f"{kind} {'done' if done.failure is None else done.failure.kind}"] += 1
        if isinstance(order, cmd.Resume) and done.failure is None:
            self.halted = False
        if isinstance(order, cmd.Pause) and order.mode == "abort" and done.failure is None:
            self.is_aborting = False
        if isinstance(order, cmd.GetStats) and done.failure is None:
            assert isinstance(done.value, Stats) and done.value.num_running >= 0


def weights_of(epoch: int) -> int:
    """An epoch names its weights."""
    return epoch % 5 if epoch else 0
