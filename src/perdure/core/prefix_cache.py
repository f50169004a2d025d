"""`PrefixCache`: what a request may begin with, what it offers to others, and what it had better wait for.

- A path is kept with the request (`state.nodes`): what it has found while it waits, what it has offered while it runs.
  Both only grow by what is new, so nobody matches a prompt twice.
- Prompt scores are kept with their page: a request that asks for them takes them from there, and a hit ends where they
  are missing. They go with the page.
- Who computes which page next is known by key. A request that waits, and whose next page somebody before it in the
  order is about to publish, need not compute it too. Only residents in prefill are in that table, and these always go
  on, so such a wait ends: with the page, or with the one who was to compute it.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.api.config import CoreConfig
from perdure.api.sampling import ALL_LOGPROBS
from perdure.core.pages import PagePool
from perdure.core.pins import Pins
from perdure.core.prefix import NO_SCORES, Key, Node, PrefixIndex, Root
from perdure.core.state import RequestState

MAX_KEPT_TOP = 32
"""Scores with more of the best are not kept: a page of 16 tokens then takes 5 KB at most, a small part of its KV."""

MOST_THAT_PAYS = 64
"""So many tokens cost about what the steps cost that a wait takes; fewer where a whole step has few."""


class PrefixCache:
    """Over one pool."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._page_size = config.page_size
        self._num_that_pay = min(MOST_THAT_PAYS, config.max_num_batched_tokens // 8)
        self.index = PrefixIndex(config.page_size)
        self.pool = PagePool(config.num_pages, self.index)
        self.pins = Pins(config, self.index, self.pool)
        self._coming: dict[Key, RequestState] = {}
        """Who computes this page next."""
        self._key_of: dict[int, Key] = {}
        """The same, by arrival."""

    # Of a request that waits

    def find(self, state: RequestState) -> int:
        """How many published pages it may begin with: one position is left to compute, and none whose scores are asked
        and not to be had."""
        if not self._reads(state):
            return 0
        if state.nodes is None:
            state.nodes = []
        limit = _most_cached(state)
        if not state.num_prompt_scores_missing:
            self.index.extend(state.nodes, self._root(state), state.tokens, limit)
        else:
            # The score of a page's first token comes with that page, so one page more than can be used is looked at.
            assert state.prompt_scores is not None
            num_scored, end = state.prompt_scores.num_scored, state.prompt_length
            self.index.extend(state.nodes, self._root(state), state.tokens, end, self._top_asked(state), num_scored)
            limit = min(limit, max(num_scored, len(state.nodes) * self._page_size - 1))
        return min(limit // self._page_size, len(state.nodes))

    def pages(self, state: RequestState, count: int) -> list[int]:
        """The first of those found."""
        return [] if state.nodes is None else [node.page for node in state.nodes[:count]]

    def is_coming(self, state: RequestState) -> bool:
        """Whether somebody before it is computing what follows the path just found, and enough of it to wait for."""
        if not self._coming or not self._reads(state):
            return False
        nodes, size = state.nodes or [], self._page_size
        first = len(nodes) * size
        end = first + max(1, -(-self._num_that_pay // size)) * size
        if end > _most_cached(state):
            return False
        other = self._coming.get(self.index.key_after(nodes, self._root(state), state.tokens))
        if other is None or other.order > state.order or end > other.prefill_end:
            return False
        if state.num_prompt_scores_missing and self._top_kept(other) < self._top_asked(state):
            return False
        return other.tokens[first:end] == state.tokens[first:end]

    def take_scores(self, state: RequestState) -> None:
        """Take over the prompt scores that came with the pages found."""
        scores, nodes, size = state.prompt_scores, state.nodes, self._page_size
        if scores is None or not nodes or not state.num_prompt_scores_missing:
            return
        for index in range((scores.num_scored + 1) // size, len(nodes)):
            kept, first = nodes[index].scores, max(index * size - 1, 0)
            assert kept is not None
            scores.extend(kept.cut(scores.num_scored - first, kept.num_scored, self._top_asked(state)))

    # Of one that runs

    def begin(self, state: RequestState, num_pages: int) -> None:
        """It is taken in with so many of the pages found."""
        path = [] if state.nodes is None else state.nodes[:num_pages]
        is_current = self.index.is_current(path)
        state.exact = state.exact and is_current
        state.nodes = path if self._config.enable_prefix_caching and is_current else None
        self._expect(state)

    def begin_beside(self, state: RequestState, sibling: RequestState, num_pages: int) -> None:
        """It is taken in with so many pages of a sibling who runs."""
        state.exact = state.exact and sibling.exact
        state.nodes = None if sibling.nodes is None else sibling.nodes[:num_pages]
        self._expect(state)

    def publish(self, state: RequestState) -> None:
        """Offer its full, committed pages to later prompts."""
        nodes, size = state.nodes, self._page_size
        if nodes is None or state.num_computed < (len(nodes) + 1) * size:
            return
        while nodes and nodes[-1].is_gone:  # reclaimed where others' pages stood for its own: now its own do
            nodes.pop()
        for index in range(len(nodes), state.num_computed // size):
            parent = nodes[-1] if nodes else self._root(state)
            end = (index + 1) * size
            node = self.index.publish(parent, state.tokens[index * size : end], state.pages[index])
            if state.prompt_scores is not None and end <= state.prompt_length:
                self._keep_scores(node, state, index)
            if self.pins:
                self.pins.published(node)
            nodes.append(node)
        self._expect(state)

    def leave(self, state: RequestState) -> None:
        """It gives its pages back: nothing more will come of it."""
        key = self._key_of.pop(state.arrival, None)
        if key is not None and self._coming.get(key) is state:
            del self._coming[key]
        self.pool.release(state.pages)

    # Of all

    def clear(self, residents: Sequence[RequestState]) -> None:
        """Nothing is found any more, and nobody inside offers what he has."""
        self._forget_paths(residents)
        self.pins.let_go()
        self.pool.forget_all()
        self.pins.find_again()

    def take_weights(self, states: Sequence[RequestState], epoch: int, keep: bool) -> None:
        """Other weights compute from now on. states: all; residents have KV of those before, and offer none of it."""
        self._forget_paths(states)
        self.pins.let_go()
        self.pool.let_go(self.index.take_weights(epoch, keep))
        self.pins.find_again()

    def _forget_paths(self, states: Sequence[RequestState]) -> None:
        self._coming.clear()
        self._key_of.clear()
        for state in states:
            state.nodes = None

    def check(self, residents: Sequence[RequestState]) -> None:
        """Every page and node is accounted for, and nobody waits for what will not come. Raises AssertionError."""
        self.index.check()
        self.pool.check([*(state.pages for state in residents), *self.pins.held])
        self.pins.check()
        for state in residents:
            self._check_path(state)
        arrivals = {state.arrival for state in residents if state.nodes is not None}
        assert self._key_of.keys() <= arrivals, "a page is expected of somebody who has left"
        for key, state in self._coming.items():
            assert self._key_of[state.arrival] == key and state.num_computed < state.prefill_end

    def _check_path(self, state: RequestState) -> None:
        """It found and offered pages of its own salt and tokens."""
        parent: Node | Root = self._root(state)
        for index, node in enumerate(state.nodes or ()):
            first = index * self._page_size
            assert node.key == (parent, tuple(state.tokens[first : first + self._page_size])), state.request
            parent = node

    # Details

    def _reads(self, state: RequestState) -> bool:
        return self._config.enable_prefix_caching and not state.request.params.skip_reading_prefix_cache

    def _root(self, state: RequestState) -> Root:
        return self.index.root(state.request.cache_salt)

    def _expect(self, state: RequestState) -> None:
        """Say which page it computes next, if that is one of its prefill and will be published."""
        before = self._key_of.pop(state.arrival, None)
        if before is not None and self._coming.get(before) is state:
            del self._coming[before]
        nodes = state.nodes
        if nodes is not None and (len(nodes) + 1) * self._page_size <= state.prefill_end:
            key = self.index.key_after(nodes, self._root(state), state.tokens)
            self._key_of[state.arrival] = key
            self._coming.setdefault(key, state)

    def _top_asked(self, state: RequestState) -> int:
        """How many of the best go with each prompt score."""
        asked, vocab_size = state.request.params.prompt_logprobs, self._config.vocab_size
        if asked is None:
            return NO_SCORES
        return vocab_size if asked == ALL_LOGPROBS else min(asked, vocab_size)

    def _top_kept(self, state: RequestState) -> int:
        """How many of the best will stay with the pages that it publishes.

        Scores are kept where the weights of now gave them: not those recorded before other weights came, which a
        request that has begun its output brings along, nor any of one whose KV is of several."""
        if not state.exact or state.prefill_end > state.prompt_length or state.group.has_old_scores:
            return NO_SCORES
        num_top = self._top_asked(state)
        return num_top if num_top <= MAX_KEPT_TOP else NO_SCORES

    def _keep_scores(self, node: Node, state: RequestState, index: int) -> None:
        num_top, size = self._top_kept(state), self._page_size
        first, end = max(index * size - 1, 0), (index + 1) * size - 1
        if num_top > node.num_top and node.weights == self.index.weights and first < end:
            assert state.prompt_scores is not None
            node.scores, node.num_top = state.prompt_scores.cut(first, end), num_top


def _most_cached(state: RequestState) -> int:
    """Positions that may come from the cache: the last one is always computed."""
    return min(len(state.tokens), state.last_position) - 1
