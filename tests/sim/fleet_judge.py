"""What must hold of a simulated fleet's life when it is over: each request has one end, equal to its oracle; nothing is
left anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.request import Request
from perdure.api.scores import TokenScores
from tests.sim.fleet_traffic import weights_of
from tests.sim.oracle import expected
from tests.sim.peers import NUM_REPLICAS, SimClient

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet


def check_rest(fleet: Fleet) -> None:
    """Nothing is left of any request or order, and all replicas agree. Raises AssertionError."""
    assert fleet.coordinator is not None
    serving = fleet.coordinator.router.members.serving
    assert len(serving) == len(fleet.replicas) == NUM_REPLICAS, "a replica was not let in"
    assert not any(client.asked or client.num_open for client in fleet.clients), "a client waits"
    fleet.coordinator.check_idle()
    for replica in fleet.replicas.values():
        replica.bridge.check_idle()
        assert not replica.prepared and not replica.taking, "an order that nobody decides is left at a replica"
        assert replica.scheduler.num_live == 0, "a request is left at a replica"
        stats = replica.scheduler.stats()
        assert stats.num_free_pages == stats.num_pages, "pages are lost"
        replica.scheduler.check()
    epochs = {replica.scheduler.stats().weight_epoch for replica in fleet.replicas.values()}
    states = {replica.scheduler.stats().state for replica in fleet.replicas.values()}
    weights = {replica.device.weights for replica in fleet.replicas.values()}
    assert len(epochs) == len(states) == len(weights) == 1, (epochs, states, weights)


def judge(fleet: Fleet) -> None:
    """Every request has the end it must have."""
    for client in fleet.clients:
        assert not client.submissions._live and not client.submissions._asked
        for ticket, request in client.requests.items():
            if ticket in client.refused:
                _judge_refusal(fleet, client, ticket)
            elif ticket in client.must_refuse:  # it ended before a replica saw it
                record = client.ended[ticket]
                assert record.finish_reason in ("abort", "error") and not record.token_ids
            else:
                for child in range(request.params.n):
                    _judge_record(fleet, client, ticket, request, client.records[ticket, child])
        for ticket, checkpoint in client.taken:
            if ticket in client.ended:
                _judge_checkpoint(fleet, client, ticket, checkpoint)


def _judge_checkpoint(fleet: Fleet, client: SimClient, ticket: int, checkpoint: Checkpoint) -> None:
    listed = checkpoint.params.logprob_token_ids
    for child, sample in enumerate(checkpoint.samples):
        record, count = client.records[ticket, child], sample.num_output
        assert sample.token_ids == record.token_ids[:count]
        fleet.marks["checkpoints with ended children"] += sample.ending is not None
        if sample.scores is not None and record.scores is not None:
            scores = TokenScores.unpack(sample.scores, sample.token_ids, listed_ids=listed)
            assert scores == record.scores.cut(0, count)


def _judge_refusal(fleet: Fleet, client: SimClient, ticket: int) -> None:
    kind = client.refused[ticket].kind
    fleet.marks[f"refused {kind}"] += 1
    assert ticket in client.must_refuse or kind == "StateError", client.refused[ticket]


def _judge_record(fleet: Fleet, client: SimClient, ticket: int, request: Request, record: ev.Record) -> None:
    reason = record.finish_reason
    fleet.marks[f"{reason} after {min(record.num_checkpoints, 3)} moves"] += 1
    fleet.marks["children moved"] += request.params.n > 1 and record.num_checkpoints > 0
    if reason == "error":
        assert record.failure is not None and record.failure.kind == "ReplicaLost", record.failure
        assert fleet.killers or fleet.restarts or fleet.wire.lossy
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

    truth = expected(request, record.seed, fleet.config, weights_at, record.child)
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
        assert fleet.traffic.next_epoch > 1 or chosen == [one for one, _, _ in truth.prompt_scores], "prompt scores"
    if not record.exact:
        assert fleet.traffic.next_epoch > 1, "only other weights are inexact here"
        fleet.marks["inexact"] += 1


def _of(stop: ev.StopMatch) -> tuple[int, int, int | None]:
    return stop.num_tokens, stop.num_matched, stop.text_end
