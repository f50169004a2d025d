"""A request that was submitted as a checkpoint, on its way: what it had already is never lost, nor told twice."""

from __future__ import annotations

from array import array

import msgspec
from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint, Sample
from perdure.api.ending import Ending
from perdure.api.fingerprint import Fingerprint
from perdure.api.sampling import SamplingParams
from perdure.api.scores import PackedScores
from perdure.coordinator import messages as m
from perdure.coordinator.client import Submissions
from tests.coordinator.test_bridge import Host

SCORED = PackedScores(
    chosen=array("f", [-1.0, -2.0, -3.0]).tobytes(), rank=bytes(12), num_top=bytes(12), top_ids=b"", top_scores=b""
)
NOTHING = PackedScores(b"", b"", b"", b"", b"")
STOPPED = Ending("stop")


def checkpoint() -> Checkpoint:
    """Two samples, of which the second has ended without a token. The first came from elsewhere."""
    first = Sample(tokens=array("i", [5, 6, 7]).tobytes(), scores=SCORED, exact=False, epochs=((0, 4),))
    return Checkpoint(
        request_id="x",
        status="running",
        params=SamplingParams(n=2, max_tokens=9, logprobs=0),
        prompt=None,
        prompt_tokens=array("i", [1, 2]).tobytes(),
        max_output=9,
        seed=3,
        logprobs_mode="raw",
        samples=(first, Sample(scores=NOTHING, ending=STOPPED)),
        prompt_scores=None,
        fingerprint=Fingerprint(),
        num_cached_tokens=0,
        num_checkpoints=1,
    )


def submitted(past: Checkpoint) -> tuple[Submissions, cmd.Submit]:
    submissions = Submissions(page_size=16)
    submissions.opened()
    command = cmd.Submit(past.as_request("x", 7, stream=True), past)
    assert submissions.send(command) == []
    return submissions, command


def test_one_that_ends_before_a_replica_told_of_it_has_what_it_had() -> None:
    submissions, _ = submitted(checkpoint())
    aborted = m.Rest(Ending("abort"))
    told = submissions.take(m.Ended(7, None), [msgspec.msgpack.encode(aborted)], 1.0)
    records = [one.event.record for one in told if isinstance(one.event, ev.Ended)]
    assert [(one.token_ids, one.finish_reason) for one in records] == [([5, 6, 7], "abort"), ([], "stop")]
    scores = records[0].scores
    assert scores is not None and list(scores.chosen) == [-1.0, -2.0, -3.0]
    assert records[0].weight_epochs == [(0, 4)] and not records[0].exact and records[0].seed == 3
    assert not submissions.num_live


def test_a_checkpoint_of_one_that_no_replica_told_of_is_as_it_was_submitted() -> None:
    past = checkpoint()
    submissions, _ = submitted(past)
    assert submissions.send(cmd.TakeCheckpoint(8, None, 7)) == []
    (told,) = submissions.take(m.Taken(8), [msgspec.msgpack.encode(past)], 1.0)
    assert isinstance(told.event, ev.Taken) and told.event.checkpoint == past


def test_one_that_is_lost_before_all_of_it_was_told_goes_on_from_its_checkpoint() -> None:
    """While its grammar is compiled nothing of it is told but that it was admitted."""
    past = checkpoint()
    _, command = submitted(past)
    for tokens, is_told in ([], False), ([5, 6, 7], True), ([5, 6, 7, 8], True):
        known = m.Known(3, 9, "raw", [m.KnownSample(tokens, [(0, 4)] if tokens else [], False)], Fingerprint(), 1)
        host = Host()
        host.bridge.take(m.Submit(1, [], known), [msgspec.msgpack.encode(command)])
        (sent,) = host.sent
        assert isinstance(sent, cmd.Submit) and sent.checkpoint is not None
        assert sent.checkpoint.token_ids == (tokens if is_told else [5, 6, 7])
        assert sent.checkpoint.seed == 3 and sent.checkpoint.samples[1] == past.samples[1]
        assert is_told or sent.checkpoint.samples == past.samples


def test_each_sample_goes_on_from_the_furthest_that_is_known_of_it() -> None:
    first = checkpoint().samples[0]
    past = replace(checkpoint(), samples=(first, replace(first, tokens=array("i", [1, 2, 3]).tobytes())))
    _, command = submitted(past)
    known = m.Known(3, 9, "raw", [m.KnownSample([5, 6, 7, 8], [(0, 4)], False)], Fingerprint(), 1)
    host = Host()
    host.bridge.take(m.Submit(1, [], known), [msgspec.msgpack.encode(command)])
    (sent,) = host.sent
    assert isinstance(sent, cmd.Submit) and sent.checkpoint is not None
    assert [sample.token_ids for sample in sent.checkpoint.samples] == [[5, 6, 7, 8], [1, 2, 3]]


def test_what_cannot_be_read_is_refused_and_ends_no_replica() -> None:
    host = Host()
    too_many = m.Known(3, 9, "raw", [m.KnownSample()] * 3, Fingerprint(), 1)
    _, command = submitted(checkpoint())
    wrong = ((), None), ([b"\xc1"], None), ([b""], None), ([msgspec.msgpack.encode(command)], too_many)
    for number, (frames, known) in enumerate(wrong):
        host.bridge.take(m.Submit(number, [], known), frames)
        ((refused, _),) = host.bridge.flush()
        assert isinstance(refused, m.Refused) and refused.number == number
        assert refused.failure.kind == "InvalidValue" and "cannot be read" in refused.failure.message
    assert not host.sent
    host.bridge.check_idle()
