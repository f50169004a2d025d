"""Threads on which grammars are compiled: with room for deep recursion, and never waited for longer than agreed.

- What takes long takes no other's place: a thread is added for those that wait, up to `MAX_THREADS`.
- What takes longer than agreed is given up, and whoever asked is told. Native code cannot be stopped, so its thread
  goes on, as a daemon; what comes of it then is nobody's.
- A thread ends when nothing waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from perdure.api.errors import InvalidValue

T = TypeVar("T")

NUM_THREADS = 2
"""That compile at a time, beside those that are held up."""
MAX_THREADS = 8
SLOW_S = 1.0
"""From then on a thread counts as held up."""
STACK_BYTES = 256 << 20
"""Of each thread, in address space: llguidance follows references by recursion, and an overflow ends the process."""
CLOSE_S = 1.0
"""How long closing waits for what is being compiled."""
_STACK_SIZE_LOCK = threading.Lock()
"""The size of new threads' stacks is the process's own setting."""


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    work: Callable[[], T]
    shown: str
    begun: float = 0.0
    """When a thread took it, by the monotonic clock."""
    is_given_up: bool = False
    future: Future[T] = field(default_factory=Future)

    def settle(self, result: T | None = None, error: BaseException | None = None) -> None:
        """The first to say something is believed: who compiled it, who gave it up, or who closed."""
        with suppress(InvalidStateError):
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)  # type: ignore[arg-type]


class Compilers(Generic[T]):
    """timeout_s: how long one thing may be compiled."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[_Job[T]] = deque()
        self._begun: list[_Job[T]] = []
        self._threads: list[threading.Thread] = []
        self._watcher: threading.Thread | None = None
        self._is_closed = False

    def submit(self, work: Callable[[], T], shown: str) -> Future[T]:
        """The future gets what `work` returns or raises, or an `InvalidValue` that begins with `shown` if it was given
        up. It is cancelled when this is closed."""
        job = _Job(work, shown)
        with self._changed:
            if self._is_closed:
                job.future.cancel()
                return job.future
            self._waiting.append(job)
            self._staff()
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="perdure-grammars-watch", daemon=True)
                self._watcher.start()
        return job.future

    def close(self) -> None:
        """Cancel everything. Threads are waited for, but not long."""
        with self._changed:
            self._is_closed = True
            left = [*self._waiting, *self._begun]
            self._waiting.clear()
            self._changed.notify_all()
            threads = [*self._threads, *filter(None, [self._watcher])]
        for job in left:
            job.future.cancel()
        until = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _staff(self) -> None:
        """Add a thread where somebody waits and fewer than `NUM_THREADS` get on. Under the lock."""
        since = time.monotonic() - SLOW_S
        num_held_up = sum(job.is_given_up or job.begun <= since for job in self._begun)
        num_threads = len(self._threads)
        if self._waiting and num_threads - num_held_up < NUM_THREADS and num_threads < MAX_THREADS:
            thread = threading.Thread(target=self._work, name=f"perdure-grammars-{num_threads}", daemon=True)
            with _STACK_SIZE_LOCK:
                usual = threading.stack_size(STACK_BYTES)
                try:
                    thread.start()
                finally:
                    threading.stack_size(usual)
            self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.settle(job.work())
            except BaseException as error:
                job.settle(error=error)
            with self._changed:
                self._begun.remove(job)
                self._changed.notify_all()
            del job

    def _next(self) -> _Job[T] | None:
        with self._changed:
            while self._waiting:
                job = self._waiting.popleft()
                if not job.future.done():
                    job.begun = time.monotonic()
                    self._begun.append(job)
                    return job
            self._threads.remove(threading.current_thread())
            return None

    def _watch(self) -> None:
        """Until nobody waits for anything."""
        while True:
            with self._changed:
                late = self._give_up()
                going = [job for job in self._begun if not job.is_given_up]
                if self._is_closed or not (late or going or self._waiting):
                    self._watcher = None
                    return
                if not late:
                    self._staff()
                    now = time.monotonic()
                    moments = [job.begun + after for job in going for after in (SLOW_S, self.timeout_s)]
                    self._changed.wait(min((moment - now for moment in moments if moment > now), default=SLOW_S))
            for job, why in late:
                job.settle(error=InvalidValue(f"{job.shown}: {why}"))

    def _give_up(self) -> list[tuple[_Job[T], str]]:
        """What takes too long, and why; what waits too, once no thread gets on. Under the lock."""
        since = time.monotonic() - self.timeout_s
        late = [job for job in self._begun if job.begun <= since and not job.is_given_up]
        for job in late:
            job.is_given_up = True
        given_up = [(job, f"not compiled within grammar_timeout_s={self.timeout_s:g}") for job in late]
        if sum(job.is_given_up for job in self._begun) >= MAX_THREADS:
            why = f"all {MAX_THREADS} threads still compile grammars that took longer than {self.timeout_s:g} s"
            given_up += [(job, why) for job in self._waiting]
            self._waiting.clear()
        return given_up
