"""The one table of what crosses between clients, the coordinator and replicas. No other message exists.

- A message is small and is read by the coordinator; prompts, scores and results travel beside it in frames of their
  own, which the coordinator passes on as they are. It never decodes a text.
- `number` names a request: towards a client that client's own number, towards a replica the coordinator's. `ask` names
  a question in the same way. So one class serves both legs.
- The order of messages in a session is that of sending (`link`), so a message may rely on those before it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.api import command as cmd
from perdure.api.ending import Ending, Failure
from perdure.api.fingerprint import Fingerprint
from perdure.api.moment import RequestEvent
from perdure.api.output import ReplicaStatus, Stats
from perdure.api.sampling import LogprobsMode
from perdure.api.scores import PackedScores

VERSION = 1
"""Of this table. Peers of another version are refused when they call."""

EngineState = Literal["running", "paused", "suspended", "stopped"]

Asked = cmd.Order | cmd.ResetPrefixCache | cmd.PinPrefix | cmd.UnpinPrefix | cmd.GetStats | cmd.Stop
"""What is asked of all replicas at once. Their tickets mean nothing on the wire: a pin is named by its `ask`."""

OF_TENSORS = "tensors:"
"""How the source of weights begins that lie in no file: then comes a name that no others have."""


class About(msgspec.Struct, frozen=True, array_like=True):
    """What a replica is. index: its place among equals. kind: in words, what all replicas must have in common.

    fingerprint, state, weight_epoch: its engine's, now. source: where its weights came from. details: for clients, who
    know how to read it.
    """

    index: int
    kind: str
    fingerprint: Fingerprint
    state: EngineState
    weight_epoch: int
    source: str
    details: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first words of whoever calls. name: the same in all its sessions, and nobody else's. about: of a replica."""

    version: int
    name: str
    about: About | None = None


class KnownSample(msgspec.Struct, frozen=True, array_like=True):
    """One output so far. epochs: pairs (first output index, epoch). ending: None = it goes on."""

    token_ids: list[int] = []
    epochs: list[tuple[int, int]] = []
    exact: bool = True
    ending: Ending | None = None


class Known(msgspec.Struct, frozen=True, array_like=True):
    """How far a request is that goes on elsewhere: what its first admission resolved, and its output so far.

    samples: in the order of their index, those of which nothing is known may be missing. fingerprint: of whoever drew
    the last token. num_moves: how often it went on elsewhere, with this time.
    """

    seed: int
    max_output: int
    logprobs_mode: LogprobsMode
    samples: list[KnownSample]
    fingerprint: Fingerprint
    num_moves: int


# Towards replicas


class Submit(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Compute a request; its frame is an `api.command.Submit`. keys: of the prompt's pages (`affinity`). again: another
    replica had it before."""

    number: int
    keys: list[bytes] = []
    known: Known | None = None
    again: bool = False


class Abort(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """End these with what they have; `everything` = all of this client's."""

    numbers: list[int]
    everything: bool = False


class Take(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """Give out a checkpoint of a request."""

    ask: int
    number: int
    end: bool


class Ask(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """A client asks something of all replicas. source: where new weights lie, on the replicas' machines, or
    `OF_TENSORS` and a name: then this client has them."""

    ask: int
    order: Asked
    source: str | None = None


class Prepare(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """Say whether this could be done; nothing changes yet. blocking: compute nothing until `Apply` or `Cancel`."""

    ask: int
    order: Asked
    source: str | None = None
    blocking: bool = False


class Apply(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """Do what was prepared."""

    ask: int


class Cancel(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """Forget what was prepared: somebody else could not."""

    ask: int


# Towards clients


class Admitted(msgspec.Struct, frozen=True, tag=8, array_like=True):
    """A replica has taken the request in, and this is what was resolved; it comes before any token.

    fingerprint: the replica's, added by the coordinator.
    """

    number: int
    seed: int
    max_output: int
    logprobs_mode: LogprobsMode
    fingerprint: Fingerprint = Fingerprint()


class Parts(msgspec.Struct, frozen=True, tag=9, array_like=True):
    """New tokens of several samples, columns by sample; a frame each, a `Part` or empty. children: which sample of its
    request. firsts: output indices. Without a token it tells only what happened."""

    numbers: list[int]
    children: list[int]
    firsts: list[int]
    epochs: list[int]
    token_ids: list[list[int]]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens from this index on, of one epoch."""

    first: int
    token_ids: list[int]
    epoch: int


class Ended(msgspec.Struct, frozen=True, tag=10, array_like=True):
    """The one end of a sample of an admitted request; its frame is a `Rest`.

    child: which; None = all that have not ended. num_left: of the request's samples, with 0 nothing more will come.
    ending, spans: of one that leaves others, what the coordinator does not have of it: it does not read the frame.
    """

    number: int
    child: int | None = 0
    num_left: int = 0
    ending: Ending | None = None
    spans: list[Span] = []


class Refused(msgspec.Struct, frozen=True, tag=11, array_like=True):
    """The one end of a request that was not."""

    number: int
    failure: Failure


class Taken(msgspec.Struct, frozen=True, tag=12, array_like=True):
    """A checkpoint in its frame, without scores: a client has those. Or why there is none."""

    ask: int
    failure: Failure | None = None


class Prepared(msgspec.Struct, frozen=True, tag=13, array_like=True):
    """A replica's word about what is to be prepared."""

    ask: int
    failure: Failure | None = None


class Answer(msgspec.Struct, frozen=True, tag=14, array_like=True):
    """It is done, or why not. A replica tells what may have changed by it."""

    ask: int
    failure: Failure | None = None
    stats: Stats | None = None
    fingerprint: Fingerprint | None = None
    state: EngineState = "running"
    weight_epoch: int = 0


class Welcome(msgspec.Struct, frozen=True, tag=15, array_like=True):
    """A client may submit, and how many replicas serve; again whenever that changes. The frame is a replica's
    `About.details`."""

    num_replicas: int


class Beat(msgspec.Struct, frozen=True, tag=16, array_like=True):
    """A replica's pulse, not numbered: a lost one does not come again. num_steps: so far. has_work: steps should
    follow."""

    num_steps: int
    has_work: bool


class Leave(msgspec.Struct, frozen=True, tag=17, array_like=True):
    """A replica goes; what it has goes on elsewhere."""


class Fetch(msgspec.Struct, frozen=True, tag=18, array_like=True):
    """A replica lacks weights: give it those of this source, a safetensors file's bytes from `first` on."""

    ask: int
    source: str
    first: int


class Piece(msgspec.Struct, frozen=True, tag=19, array_like=True):
    """Some of them in its frame. total: how many bytes there are of all. failure: why none come."""

    ask: int
    first: int
    total: int = 0
    failure: Failure | None = None


class Held(msgspec.Struct, frozen=True, tag=20, array_like=True):
    """What a replica's prefix cache holds, by the keys of pages (`api.prefix_key`): what has come and what has gone.
    is_anew: nothing that was told before holds."""

    is_anew: bool
    held: list[bytes]
    gone: list[bytes]


class Look(msgspec.Struct, frozen=True, tag=21, array_like=True):
    """A client asks who serves. The coordinator answers by itself, at once."""

    ask: int


class Seen(msgspec.Struct, frozen=True, tag=22, array_like=True):
    """Who serves, and who was lost of late. owners: pairs (the client's number of a request, its replica's index)."""

    ask: int
    replicas: list[ReplicaStatus]
    owners: list[tuple[int, int]]


Message = (
    Submit
    | Abort
    | Take
    | Ask
    | Prepare
    | Apply
    | Cancel
    | Admitted
    | Parts
    | Ended
    | Refused
    | Taken
    | Prepared
    | Answer
    | Welcome
    | Beat
    | Leave
    | Fetch
    | Piece
    | Held
    | Look
    | Seen
)


# Frames beside messages


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What belongs to new tokens. prompt_scores: with the first token. moments: times are seconds since admission."""

    scores: PackedScores | None = None
    prompt_scores: PackedScores | None = None
    moments: list[RequestEvent] = []


class Rest(msgspec.Struct, frozen=True, array_like=True):
    """What a client does not have yet of a sample's record: how it ended, and the tokens after its last part.

    prompt_scores: with the last sample, unless a part brought them. epochs: of these tokens, pairs (first output index,
    epoch).
    """

    ending: Ending
    token_ids: list[int] = []
    scores: PackedScores | None = None
    prompt_scores: PackedScores | None = None
    epochs: list[tuple[int, int]] = []
    moments: list[RequestEvent] = []
    arrival: int = 0
    seed: int = 0
    exact: bool = True
    num_cached_tokens: int = 0
    num_pauses: int = 0
    num_evictions: int = 0
    num_checkpoints: int = 0
