"""`Client`: `LLM`'s calls, answered by the replicas behind a coordinator that somebody else started."""

from __future__ import annotations

import weakref

from perdure.coordinator.wire import read_secret
from perdure.engine.llm import LLM
from perdure.engine.remote import PATIENCE_S, RemoteEngine


class Client(LLM):
    """endpoint: tcp://HOST:PORT or ipc://PATH of a coordinator. Any number of clients may be there at once, and each
    sees its own requests only; `pause`, `update_weights` and the like are for all.

    tokenizer: where it lies, if not where the replicas have it; without one, prompts are ids. secret_file: holds what
    the coordinator's holds, where that can be reached from other machines. patience_s: how long a client waits that
    hears nothing. Raises `InvalidValue`, and `EngineDead` if nobody serves.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        tokenizer: str | None = None,
        secret_file: str | None = None,
        return_prompt: bool = False,
        progress: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._engine = RemoteEngine(
            endpoint,
            secret=read_secret(secret_file),
            tokenizer=tokenizer,
            return_prompt=return_prompt,
            progress=progress,
            patience_s=patience_s,
        )
        self._finalizer = weakref.finalize(self, self._engine.close)
