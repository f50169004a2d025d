"""`Front`: what all endpoints share - the engine, the model's name, what is counted, whether the server is ending."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from perdure import AsyncLLM, InvalidValue, RequestOutput, SamplingParams, StateError
from perdure.api.errors import shown
from perdure.server.config import ServeConfig
from perdure.server.errors import HTTPError
from perdure.server.feed import Feed
from perdure.server.incoming import Incoming
from perdure.server.metrics import Metrics
from perdure.server.peers import Peers
from perdure.server.protocol.control import Broadcast
from perdure.server.tools import found_convention
from perdure.server.tracing import Tracing
from perdure.server.weight_group import WeightGroup

log = logging.getLogger("perdure")

MAX_ID = 256
ID_PATTERN = rf"[!-~]{{1,{MAX_ID}}}"
_HEADER_VALUE = re.compile(ID_PATTERN)


class Front:
    """max_model_len: None where nobody told. convention: how the model writes calls of tools; None = it has no way.

    peers: None = there are none. metrics_folder: where their counts lie, too. created: when the server began.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServeConfig,
        *,
        peers: Peers | None = None,
        metrics_folder: str | None = None,
        created: int | None = None,
    ) -> None:
        self.llm = llm
        self.peers = peers or Peers(llm)
        self.config = config
        description = llm.describe()
        self.root = str(description["model"])
        self.model = config.served_model_name or self.root
        self.max_model_len: int | None = description.get("max_model_len")
        self.metrics = Metrics(self.model, description, metrics_folder)
        self.feed = Feed(llm, self.model)
        endpoint = config.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing.to(endpoint, self.model)
        self.convention = found_convention(llm, config.tool_call_parser)
        self.created = int(time.time()) if created is None else created
        self.weight_group: WeightGroup | None = None
        """Over which weights may be broadcast."""
        self._joining: asyncio.Task[None] | None = None
        self.incoming = Incoming()
        """Weights that come in parts."""
        self.announced = Incoming()
        """Those of clients that are answered before they send."""
        self.is_draining = False
        self.is_warm = False
        self._num_inside = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def ended(
        self, request_id: str, num_prompt_tokens: int, params: SamplingParams, result: RequestOutput | BaseException
    ) -> None:
        """A request of the engine is over: it is counted, and traced."""
        self.metrics.ended(num_prompt_tokens, params, result)
        if self.tracing is not None:
            self.tracing.ended(request_id, num_prompt_tokens, params, result)

    def check_model(self, asked: str | None) -> None:
        """Raises `HTTPError` for another model than this one."""
        if asked is not None and asked not in (self.model, self.root):
            raise HTTPError(
                404,
                f"model={asked[:200]!r} is not served here, {self.model!r} is",
                "not_found_error",
                param="model",
                code="model_not_found",
            )

    def begin_to_join(self, joining: Coroutine[Any, Any, WeightGroup]) -> asyncio.Task[None]:
        """Join a group for weights, unless there is one or will be. The task raises what the joining raises."""
        why = None
        if self.config.num_front_ends > 1:
            why = f"num_front_ends={self.config.num_front_ends}: a group of weights needs one front end"
        elif self.has_group:
            why = "there is a group already: POST /destroy_weight_group first"
        if why is not None:
            joining.close()
            raise StateError(why)
        self._joining = asyncio.create_task(self._join(joining))
        return self._joining

    async def _join(self, joining: Coroutine[Any, Any, WeightGroup]) -> None:
        try:
            self.weight_group = await joining
        except Exception as error:
            log.warning("%s", error)
            raise
        finally:
            self._joining = None

    @property
    def has_group(self) -> bool:
        """Whether there is a group for weights, or will be."""
        return self.weight_group is not None or self._joining is not None

    async def received(self, asked: Broadcast, packed_bytes: int | None = None) -> dict[str, Tensor]:
        """Tensors over that group. One that does not come ends it: nobody knows what is on its way there."""
        if self._joining is not None:
            await asyncio.shield(self._joining)
        group = self.weight_group
        if group is None:
            raise StateError("broadcast: there is no group: POST /init_weight_group first")
        try:
            return await group.receive(asked, packed_bytes)
        except StateError:
            if self.weight_group is group:
                self.leave()
            raise

    def leave(self) -> None:
        """The group for weights, if there is one."""
        self.weight_group = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what must be done before the server may end. Raises `HTTPError` once it is ending."""
        if self.is_draining:
            raise HTTPError(
                503, "the server is ending and takes no new requests", "service_unavailable_error", code="draining"
            )
        self._num_inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._idle.set()

    async def drained(self) -> None:
        """Returns when nothing is inside."""
        await self._idle.wait()


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def is_id(given: object) -> bool:
    """Whether a header can hold it."""
    return isinstance(given, str) and _HEADER_VALUE.fullmatch(given) is not None


def id_given_or_new(given: str | None, kind: str) -> str:
    """The id of a request. Raises `InvalidValue`."""
    if given is None:
        return new_id(kind)
    if not is_id(given):
        raise InvalidValue(f"request_id={shown(given)} is not 1 to {MAX_ID} letters, digits and signs of ASCII")
    return given
