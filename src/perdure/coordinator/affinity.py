"""Which replica a request goes to: by turns, by load, or by who has computed the beginning of its prompt.

- A key names a whole page of a prompt and all before it, so one look-up a page finds how far a replica's cache may
  reach.
- An entry says that a replica was sent these pages or has them, and since when; one older than the TTL does not count.
  It goes when the replica says that it has them no more, with the replica, with the weights and with the prefix cache;
  and the oldest go when there are too many.
- score = (pages found in a row) / (pages of the prompt) - alpha * (load - mean load) / max(1, mean load). The best
  wins, then the least loaded, then the lowest index. Where nobody has anything the least loaded wins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import itemgetter

from perdure.api.config import RoutingPolicy
from perdure.api.prefix_key import page_key, root_key

MOST_KEYS = 1_000_000
"""Entries kept; some 200 bytes each."""
MOST_KEYS_A_PROMPT = 1024
"""Longer prompts are known by their beginning."""


def page_keys(token_ids: Sequence[int], page_size: int, salt: str | None = None) -> list[bytes]:
    """A key for each full page but one that would leave nothing to compute. salt: requests of another share nothing."""
    keys: list[bytes] = []
    before = root_key(salt)
    for first in range(0, len(token_ids) - page_size, page_size):
        before = page_key(before, token_ids[first : first + page_size])
        keys.append(before)
        if len(keys) == MOST_KEYS_A_PROMPT:
            break
    return keys


class PrefixTable:
    """When each replica, by its session, was last sent each page, or came to have it."""

    def __init__(self, ttl_s: float, most_keys: int = MOST_KEYS) -> None:
        self._ttl_s = ttl_s
        self._most_keys = most_keys
        self._sent: OrderedDict[bytes, dict[int, float]] = OrderedDict()
        """Least recently sent first."""

    def __len__(self) -> int:
        return len(self._sent)

    def touch(self, keys: Sequence[bytes], session: int, now: float) -> None:
        for key in keys:
            self._sent.setdefault(key, {})[session] = now
            self._sent.move_to_end(key)
        self.expire(now)

    def expire(self, now: float) -> None:
        """Forget what is too old, and what is too much."""
        while self._sent:
            key, sent = next(iter(self._sent.items()))
            if now - max(sent.values()) <= self._ttl_s and len(self._sent) <= self._most_keys:
                return
            del self._sent[key]

    def holders(self, key: bytes) -> Mapping[int, float]:
        """Replicas with an entry for this page, though perhaps too old a one."""
        return self._sent.get(key, {})

    def depth(self, keys: Sequence[bytes], session: int, now: float) -> int:
        """How many pages from the first on this replica was sent."""
        for at, key in enumerate(keys):
            sent_at = self._sent.get(key, {}).get(session)
            if sent_at is None or now - sent_at > self._ttl_s:
                return at
        return len(keys)

    def drop(self, keys: Sequence[bytes], session: int) -> None:
        """This replica has these no more."""
        for key in keys:
            sent = self._sent.get(key)
            if sent is not None and sent.pop(session, None) is not None and not sent:
                del self._sent[key]

    def forget(self, session: int) -> None:
        for key in [key for key, sent in self._sent.items() if sent.pop(session, None) is not None and not sent]:
            del self._sent[key]

    def clear(self) -> None:
        self._sent.clear()


_LOAD = itemgetter(1)


class Chooser:
    """The policy, and what it remembers."""

    def __init__(self, policy: RoutingPolicy, alpha: float, ttl_s: float) -> None:
        self._policy = policy
        self._alpha = alpha
        self._turn = 0
        self.table = PrefixTable(ttl_s)
        self.looks_up = policy in ("longest_prefix", "first_prefix_block")

    def choose(self, keys: Sequence[bytes], loads: Sequence[tuple[int, int]], now: float) -> int:
        """loads: (session, requests it has) of those that may be chosen, by index. Returns the session."""
        assert loads
        if self._policy == "round_robin":
            self._turn += 1
            return loads[(self._turn - 1) % len(loads)][0]
        least = min(loads, key=_LOAD)
        if not self.looks_up:
            return least[0]
        chosen = self._by_prefix(keys, loads, least, now)
        self.table.touch(keys, chosen, now)
        return chosen

    def holds(self, session: int, is_anew: bool, held: Sequence[bytes], gone: Sequence[bytes], now: float) -> None:
        """What a replica says of its cache. is_anew: all that was known of it before is void."""
        if not self.looks_up:
            return
        if is_anew:
            self.table.forget(session)
        self.table.drop(gone, session)
        self.table.touch(held, session, now)

    def _by_prefix(
        self, keys: Sequence[bytes], loads: Sequence[tuple[int, int]], least: tuple[int, int], now: float
    ) -> int:
        """Of those that have nothing only the least loaded can win, so no other is looked at."""
        looked_up = keys[:1] if self._policy == "first_prefix_block" else keys
        holders = self.table.holders(keys[0]) if keys else {}
        if not holders:
            return least[0]
        mean = sum(map(_LOAD, loads)) / len(loads)
        best, best_score = least, -float("inf")
        for one in [one for one in loads if one[0] in holders or one is least]:
            session, load = one
            depth = self.table.depth(looked_up, session, now)
            score = depth / len(looked_up) - self._alpha * (load - mean) / max(1.0, mean)
            if (score, -load) > (best_score, -best[1]):
                best, best_score = one, score
        return best[0]
