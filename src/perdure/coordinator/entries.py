"""`Entries`: every request between its submission and its terminal reply, and who owns it. Retired in one function.

- A client's requests are named by its session and its own number, so that two clients' number 0 are two requests.
- What is kept of a request is what another replica needs to go on with it: the submitted frame, what its admission
  resolved, and its output's ids. Scores are not kept: they are at the client's.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.api.ending import Ending
from perdure.api.fingerprint import Fingerprint
from perdure.coordinator.messages import Admitted, Known, KnownSample

ID_BYTES = 8


class SampleLog:
    """One output so far. exact: of what it had when its owner got it. ending: None = it goes on."""

    __slots__ = ("ending", "epochs", "exact", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.epochs: list[tuple[int, int]] = []
        self.exact = True
        self.ending: Ending | None = None

    def known(self) -> KnownSample:
        return KnownSample(self.token_ids, self.epochs, self.exact, self.ending)

    def recall(self, known: KnownSample) -> None:
        self.token_ids, self.epochs = list(known.token_ids), list(known.epochs)
        self.exact, self.ending = known.exact, known.ending

    def grow(self, first: int, token_ids: list[int], epoch: int) -> None:
        assert first == len(self.token_ids), f"a part of tokens from {first} on after {len(self.token_ids)}"
        self.token_ids += token_ids
        if not self.epochs or self.epochs[-1][1] != epoch:
            self.epochs.append((first, epoch))

    def cross(self) -> None:
        """It goes on where bits come out otherwise."""
        self.exact = self.exact and (not self.token_ids or self.ending is not None)


class Entry:
    """One request. serial: the coordinator's number for it. owner: the replica that computes it, None = it waits."""

    __slots__ = (
        "admitted",
        "client",
        "deadline",
        "fingerprint",
        "frames",
        "is_aborted",
        "is_begun",
        "keys",
        "num_fruitless",
        "num_moves",
        "num_was_known",
        "number",
        "owner",
        "samples",
        "serial",
        "takes",
    )

    def __init__(self, serial: int, client: int, number: int, frames: Sequence[bytes], keys: list[bytes]) -> None:
        self.serial = serial
        self.client: int | None = client
        """None = gone: nobody hears of its end."""
        self.number = number
        self.frames = frames
        self.keys = keys
        self.owner: int | None = None
        self.admitted: Admitted | None = None
        self.samples: list[SampleLog] = []
        """By index, as far as something is known."""
        self.fingerprint = Fingerprint()
        """Of whoever drew the last token before it came to its owner."""
        self.is_aborted = False
        self.num_moves = 0
        self.num_was_known = 0
        """Its tokens when its owner got it."""
        self.is_begun = False
        """Whether its owner has admitted it."""
        self.num_fruitless = 0
        """Owners in a row that began with it and were lost without a new token."""
        self.takes: list[tuple[int, bool]] = []
        """Checkpoints of it that its client asked for while it waited, and whether it ends with them."""
        self.deadline: float | None = None
        """When it has waited for a replica long enough."""

    def recall(self, known: Known) -> None:
        """Go on from what its client still knew."""
        self.admitted = Admitted(self.number, known.seed, known.max_output, known.logprobs_mode)
        for child, sample in enumerate(known.samples):
            self.sample(child).recall(sample)
        self.fingerprint, self.num_moves = known.fingerprint, known.num_moves

    def known(self) -> Known | None:
        """What its next owner is told; None = nothing happened to it yet."""
        if self.admitted is None:
            return None
        one = self.admitted
        samples = [sample.known() for sample in self.samples]
        return Known(one.seed, one.max_output, one.logprobs_mode, samples, self.fingerprint, self.num_moves)

    def sample(self, child: int) -> SampleLog:
        while len(self.samples) <= child:
            self.samples.append(SampleLog())
        return self.samples[child]

    @property
    def num_output(self) -> int:
        """Tokens so far, of all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def num_bytes(self) -> int:
        """Of what was submitted."""
        return sum(map(len, self.frames)) + sum(map(len, self.keys))


class Entries:
    """Five ways to find an entry, and all forget it together."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._next = 1
        self._by_serial: dict[int, Entry] = {}
        self._by_client: dict[int, dict[int, Entry]] = {}
        self._by_owner: dict[int, dict[int, Entry]] = {}
        self._waiting: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_serial)

    def add(self, client: int, number: int, frames: Sequence[bytes], keys: list[bytes]) -> Entry:
        """A new request; it waits."""
        entry = Entry(self._next, client, number, frames, keys)
        self._next += 1
        self._by_serial[entry.serial] = entry
        self._by_client.setdefault(client, {})[number] = entry
        self._waiting[entry.serial] = entry
        self.num_bytes += entry.num_bytes
        return entry

    def give(self, entry: Entry, owner: int) -> None:
        del self._waiting[entry.serial]
        entry.owner = owner
        entry.deadline = None
        entry.num_was_known = entry.num_output
        entry.is_begun = False
        self._by_owner.setdefault(owner, {})[entry.serial] = entry

    def take_back(self, entry: Entry) -> None:
        """Its owner is lost; it waits again."""
        self._disown(entry)
        self._waiting[entry.serial] = entry

    def _disown(self, entry: Entry) -> None:
        assert entry.owner is not None
        owned = self._by_owner[entry.owner]
        del owned[entry.serial]
        if not owned:
            del self._by_owner[entry.owner]
        entry.owner = None

    def orphan(self, entry: Entry) -> None:
        """Its client is gone."""
        assert entry.client is not None
        theirs = self._by_client[entry.client]
        del theirs[entry.number]
        if not theirs:
            del self._by_client[entry.client]
        entry.client, entry.takes = None, []

    def retire(self, entry: Entry) -> None:
        """The one end of an entry, on its terminal reply."""
        if entry.owner is None:
            del self._waiting[entry.serial]
        else:
            self._disown(entry)
        if entry.client is not None:
            self.orphan(entry)
        del self._by_serial[entry.serial]
        self.num_bytes -= entry.num_bytes

    def owned(self, owner: int, serial: int) -> Entry | None:
        """A replica's request; None if it is not, or no longer, its own."""
        return self._by_owner.get(owner, {}).get(serial)

    def of_owner(self, owner: int) -> list[Entry]:
        return list(self._by_owner.get(owner, {}).values())

    def load(self, owner: int) -> int:
        return len(self._by_owner.get(owner, ()))

    def loads(self, owners: Sequence[int]) -> list[tuple[int, int]]:
        """Each with its load; asked for every request, of all replicas."""
        found, nothing = self._by_owner.get, ()
        return [(owner, len(found(owner, nothing))) for owner in owners]

    def of_client(self, client: int) -> list[Entry]:
        return list(self._by_client.get(client, {}).values())

    def named(self, client: int, number: int) -> Entry | None:
        return self._by_client.get(client, {}).get(number)

    @property
    def last(self) -> int:
        """The serial of the last that came."""
        return self._next - 1

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Entry]:
        """In the order of their numbers: one that comes back goes before those that came later."""
        return sorted(self._waiting.values(), key=lambda entry: entry.serial)

    @property
    def all(self) -> list[Entry]:
        return list(self._by_serial.values())

    def check(self) -> None:
        """Every entry is found where it should be, and nowhere else. Raises AssertionError."""
        owned = [entry for entries in self._by_owner.values() for entry in entries.values()]
        assert all(entry.owner is not None for entry in owned) and all(e.owner is None for e in self.waiting)
        assert sorted(e.serial for e in [*owned, *self.waiting]) == sorted(self._by_serial)
        named = [entry.serial for entries in self._by_client.values() for entry in entries.values()]
        assert sorted(named) == sorted(entry.serial for entry in self.all if entry.client is not None)
        assert self.num_bytes == sum(entry.num_bytes for entry in self.all)
        assert all(self._by_owner.values()) and all(self._by_client.values())
