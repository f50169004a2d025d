"""The pins of a simulated life: when they must be refused, and that all of them are given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.api import command as cmd
from perdure.api.event import Failure

if TYPE_CHECKING:
    from tests.sim.life import Life


class Pinning:
    """The view kept here is the client's: what is pinned once all that was sent is carried out."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self._pinned: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self._asked: dict[int, int | None] = {}
        """How many tokens each must hold; None = it must be refused."""

    def give(self) -> None:
        """Pin a prefix, or release one, perhaps twice."""
        rng, config = self.life.rng, self.life.config
        if self._pinned and rng.random() < 0.5:
            self._release(rng.choice(list(self._pinned)), again=rng.random() < 0.2)
            return
        tokens = rng.choice(self.life.bases)[: rng.randint(0, config.max_model_len)]
        if rng.random() < 0.05:
            tokens = rng.choice(([config.vocab_size], tokens * 3))
        ticket, salt = self.life.ticket(), rng.choice((None, "a"))
        whole = len(tokens) // config.page_size * config.page_size
        prefix = (salt, tuple(tokens[:whole]))
        num_pages = sum(len(held) // config.page_size for _, held in {*self._pinned.values(), prefix})
        fits = num_pages - (-config.max_num_tokens // config.page_size) <= config.num_pages
        is_fine = whole > 0 and len(tokens) <= config.max_model_len and max(tokens) < config.vocab_size
        self._asked[ticket] = whole if fits and is_fine and config.enable_prefix_caching else None
        if self._asked[ticket] is not None:
            self._pinned[ticket] = prefix
        self.life.send(cmd.PinPrefix(ticket, tokens, salt))

    def answered(self, ticket: int, value: object, failure: Failure | None) -> None:
        if ticket in self._asked:
            assert value == self._asked.pop(ticket), (value, failure)
            self.life.marks["pins refused" if failure else "pins"] += 1

    def end(self) -> None:
        pins = self.life.scheduler.requests.cache.pins
        self.life.marks["pinned pages"] += pins.num_pages
        for pin in list(self._pinned):
            self._release(pin)

    def _release(self, pin: int, again: bool = False) -> None:
        del self._pinned[pin]
        for _ in range(1 + again):
            self.life.send(cmd.UnpinPrefix(self.life.ticket(), pin))
