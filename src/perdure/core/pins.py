"""`Pins`: prefixes whose pages stay, however full the pool is, until they are released.

- A pin computes nothing: it holds what is published of its prefix, and each further page when a request publishes it.
- A page that a pin holds cannot be reclaimed, nor those before it. When the cache is cleared, or other weights come,
  the pages go as all others do; the pin stays, and holds its prefix again as it is computed again.
- What pins may ever hold together leaves room for the longest request. So none is put out of reach by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perdure.api.config import CoreConfig
from perdure.api.errors import InvalidValue, MaxSequenceLengthOverflow
from perdure.core import budget
from perdure.core.admission import check_ids
from perdure.core.pages import PagePool
from perdure.core.prefix import Key, Node, PrefixIndex


class Pin:
    """One prefix, cut to full pages; nodes: those it holds."""

    __slots__ = ("nodes", "salt", "tokens")

    def __init__(self, tokens: Sequence[int], salt: str | None) -> None:
        self.tokens = tuple(tokens)
        self.salt = salt
        self.nodes: list[Node] = []

    @property
    def pages(self) -> list[int]:
        return [node.page for node in self.nodes]


class Pins:
    """By the ticket of the command that asked."""

    def __init__(self, config: CoreConfig, index: PrefixIndex, pool: PagePool) -> None:
        self._config = config
        self._index = index
        self._pool = pool
        self._pins: dict[int, Pin] = {}
        self._next: dict[Key, list[Pin]] = {}
        """Pins that are not whole, by the page they wait for."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def held(self) -> list[list[int]]:
        """Each pin's pages, in order of position."""
        return [pin.pages for pin in self._pins.values()]

    @property
    def num_pages(self) -> int:
        """Pages that are held now."""
        return len({page for pages in self.held for page in pages})

    def add(self, ticket: int, tokens: Sequence[int], salt: str | None) -> int:
        """Pin a prefix; returns how many of its tokens it holds as soon as they are computed. Raises `InvalidValue`."""
        pin = Pin(tokens[: len(tokens) // self._config.page_size * self._config.page_size], salt)
        self._check(tokens, pin)
        self._pins[ticket] = pin
        self._hold(pin)
        return len(pin.tokens)

    def release(self, ticket: int) -> None:
        """Nothing happens if there is no such pin."""
        pin = self._pins.pop(ticket, None)
        if pin is not None:
            self._stop_waiting(pin)
            self._pool.release(pin.pages)

    def published(self, node: Node) -> None:
        """A node is there that perhaps was not before."""
        for pin in self._next.pop(node.key, ()):
            self._hold(pin)

    def let_go(self) -> None:
        """Of all pages, because what they are named by changes; then comes `find_again`."""
        self._next.clear()
        for pin in self._pins.values():
            self._pool.release(pin.pages)
            pin.nodes = []

    def find_again(self) -> None:
        """What is published under the roots of now."""
        for pin in self._pins.values():
            self._hold(pin)

    def _hold(self, pin: Pin) -> None:
        """All that is published by now; then wait for the next page."""
        num_held = len(pin.nodes)
        root = self._index.root(pin.salt)
        self._index.extend(pin.nodes, root, pin.tokens, len(pin.tokens))
        self._pool.share(pin.pages[num_held:])
        if len(pin.nodes) * self._config.page_size < len(pin.tokens):
            self._next.setdefault(self._index.key_after(pin.nodes, root, pin.tokens), []).append(pin)

    def _stop_waiting(self, pin: Pin) -> None:
        key = self._index.key_after(pin.nodes, self._index.root(pin.salt), pin.tokens)
        if key in self._next:
            self._next[key].remove(pin)
            if not self._next[key]:
                del self._next[key]

    def _check(self, tokens: Sequence[int], pin: Pin) -> None:
        config = self._config
        if not config.enable_prefix_caching:
            raise InvalidValue("enable_prefix_caching=False: there is no cache that could keep a prefix")
        check_ids("prompt_token_ids", tokens, config.vocab_size)
        if not pin.tokens:
            raise InvalidValue(
                f"the prefix has {len(tokens)} tokens, and pages are kept whole: page_size={config.page_size}"
            )
        if len(tokens) > config.max_model_len:
            raise MaxSequenceLengthOverflow(
                f"the prefix has {len(tokens)} tokens, max_model_len is {config.max_model_len}"
            )
        pinned = Counter((other.salt, other.tokens) for other in self._pins.values())
        pinned[pin.salt, pin.tokens] = 1
        num_pages = sum(len(prefix) // config.page_size for _, prefix in pinned)
        longest = budget.num_pages_for(config.max_num_tokens, config.page_size)
        if num_pages + longest > config.num_pages:
            raise InvalidValue(
                f"the prefix takes {len(pin.tokens) // config.page_size} pages, with those pinned before "
                f"{num_pages}, and {config.num_pages - longest} can be pinned: of num_pages={config.num_pages}, the "
                f"longest request may need {longest}"
            )

    def check(self) -> None:
        """What a pin waits for is not there yet. Raises AssertionError."""
        waiting = [pin for pins in self._next.values() for pin in pins]
        whole = [pin for pin in self._pins.values() if len(pin.nodes) * self._config.page_size == len(pin.tokens)]
        assert len(waiting) + len(whole) == len(self._pins)
        assert all(not node.is_gone for pin in self._pins.values() for node in pin.nodes)
