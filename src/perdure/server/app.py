"""All endpoints, in one table, and the way into each: key, drain, handler, errors in one form.

Routes and the OpenAPI description (`openapi.py`) are both made of the table.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time

from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from perdure.server import auth, control, openapi, operations, page, tokens, transfer, trl, vllm
from perdure.server.batch import ClientGone
from perdure.server.chat import chat_completions
from perdure.server.completions import completions
from perdure.server.endpoint import Endpoint, Handler, Parameter
from perdure.server.errors import HTTPError, as_http
from perdure.server.front import Front, new_id
from perdure.server.protocol import chat, common, live
from perdure.server.protocol import completions as completion_bodies
from perdure.server.protocol import control as control_bodies
from perdure.server.protocol import responses as response_bodies
from perdure.server.protocol import tokens as token_bodies
from perdure.server.protocol import vllm as vllm_bodies
from perdure.server.responses import responses

requests_log = logging.getLogger("perdure.requests")

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/v1/completions",
        completions,
        "Continue prompts.",
        completion_bodies.CompletionRequest,
        completion_bodies.Completion,
        works=True,
        streams=completion_bodies.Completion,
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a conversation.",
        chat.ChatRequest,
        chat.ChatCompletion,
        works=True,
        streams=chat.ChatChunk,
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        responses,
        "Answer, as items.",
        response_bodies.ResponsesRequest,
        response_bodies.ResponsesResponse,
        works=True,
        streams=response_bodies.ResponsesEvent,
    ),
    Endpoint(
        "POST",
        "/generate/",
        trl.generate,
        "Continue prompts, as TRL's server did.",
        vllm_bodies.GenerateRequest,
        vllm_bodies.Generated,
        works=True,
    ),
    Endpoint(
        "POST",
        "/chat/",
        trl.chat,
        "Answer conversations, as TRL's server did.",
        vllm_bodies.ConversationsRequest,
        vllm_bodies.Generated,
        works=True,
    ),
    Endpoint("GET", "/v1/models", operations.models, "The model that is served.", gives=common.Models),
    Endpoint("GET", "/v1/models/{model:path}", operations.model, "The same by its name.", gives=common.Model),
    Endpoint(
        "POST",
        "/tokenize",
        tokens.tokenize,
        "The ids of a prompt or a conversation.",
        token_bodies.TokenizeRequest,
        token_bodies.Tokenized,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        tokens.detokenize,
        "The text of ids.",
        token_bodies.DetokenizeRequest,
        token_bodies.Detokenized,
    ),
    Endpoint("GET", "/state/live", page.live, "What is going on, for the page at /.", gives=live.Live),
    Endpoint("GET", "/tokenizer_info", vllm.tokenizer_info, "Of its tokenizer.", gives=vllm_bodies.TokenizerInfo),
    Endpoint("GET", "/server_info", vllm.server_info, "Its settings.", gives=vllm_bodies.ServerInfo),
    Endpoint("GET", "/get_world_size", vllm.get_world_size, "How many ranks join.", gives=vllm_bodies.WorldSize),
    Endpoint("GET", "/health", operations.health, "Whether it is alive.", access="open"),
    Endpoint("GET", "/ready", operations.ready, "Whether it computes.", gives=control_bodies.Ready, access="open"),
    Endpoint("GET", "/metrics", operations.metrics, "For Prometheus.", access="open", media="text/plain"),
    Endpoint("GET", "/version", operations.version, "Of perdure.", gives=control_bodies.Version, access="open"),
)


def _control(method: str, path: str, handler: Handler, summary: str, takes: type[Struct] | None = None) -> Endpoint:
    return Endpoint(method, path, handler, summary, takes, control_bodies.Done, access="control")


PAUSE_MODE = Parameter("mode", {"type": "string", "enum": ["keep", "wait", "abort"], "default": "keep"})
SLEEP_LEVEL = Parameter("level", {"type": "string", "enum": ["1", "2"], "default": "1"})
WAKE_TAGS = Parameter("tags", {"type": "array", "items": {"type": "string", "enum": ["weights", "kv", "kv_cache"]}})

CONTROL: tuple[Endpoint, ...] = (
    _control("POST", "/pause", control.pause, "Stop between steps.", control_bodies.PauseRequest)._replace(
        parameters=(PAUSE_MODE,)
    ),
    _control("POST", "/resume", control.resume, "Go on.", control_bodies.ResumeRequest),
    _control("POST", "/suspend", control.suspend, "Stop and give memory back.", control_bodies.SuspendRequest),
    _control("POST", "/abort", control.abort, "End requests with what they have.", control_bodies.AbortRequest),
    _control("POST", "/reset", control.reset, "Begin anew."),
    _control("POST", "/reset_prefix_cache", control.reset_prefix_cache, "Forget cached prefixes.")._replace(
        gives=vllm_bodies.CacheCleared
    ),
    _control("POST", "/weights", control.weights, "Compute with other weights.", control_bodies.WeightsRequest),
    _control("POST", "/init_weight_group", control.init_weight_group, "Join.", control_bodies.GroupRequest),
    _control("POST", "/destroy_weight_group", control.destroy_weight_group, "Leave it."),
    _control("POST", "/checkpoint", control.checkpoint, "A live request.", control_bodies.CheckpointRequest)._replace(
        gives=None, media="application/octet-stream"
    ),
    _control("GET", "/state", control.state, "What the engine is doing.")._replace(gives=control_bodies.State),
    _control("POST", "/sleep", control.sleep, "vLLM's /suspend.", control_bodies.SleepRequest)._replace(
        parameters=(SLEEP_LEVEL,)
    ),
    _control("POST", "/wake_up", control.wake_up, "vLLM's /resume.", control_bodies.WakeRequest)._replace(
        parameters=(WAKE_TAGS,)
    ),
    _control("GET", "/is_sleeping", control.is_sleeping, "Whether it is suspended.")._replace(
        gives=control_bodies.Asleep
    ),
    _control("POST", "/update_weights", transfer.update_weights, "/weights, or a part.", vllm_bodies.UpdateRequest),
    _control("POST", "/init_weight_transfer_engine", transfer.init_transfer, "Join.", vllm_bodies.InitTransferRequest),
    _control("POST", "/start_weight_update", transfer.start_update, "Begin anew.", vllm_bodies.StartUpdateRequest),
    _control("POST", "/finish_weight_update", transfer.finish_update, "Compute with what came."),
    _control("POST", "/init_communicator/", trl.init_communicator, "TRL's.", vllm_bodies.InitCommunicatorRequest),
    _control("POST", "/update_named_param/", trl.update_named_param, "One tensor.", vllm_bodies.NamedTensorRequest),
    _control("POST", "/close_communicator/", trl.close_communicator, "Leave it."),
)


class Door:
    """The way into one endpoint, as an ASGI application."""

    def __init__(self, front: Front, endpoint: Endpoint) -> None:
        self._front = front
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        begun = time.monotonic()
        with contextlib.ExitStack() as inside:
            try:
                response = await self._answer(request, inside)
            except ClientGone:
                self._log(request, 499, begun, None)
                return
            await response(scope, receive, send)
        self._log(request, response.status_code, begun, response.headers.get("x-request-id"))

    async def _answer(self, request: Request, inside: contextlib.ExitStack) -> Response:
        try:
            auth.check(request, self._endpoint.access, self._front.config)
            if self._endpoint.works:
                inside.enter_context(self._front.working())
            if self._front.tracing is not None:
                inside.enter_context(self._front.tracing.entered(request.headers))
            return await self._endpoint.handler(self._front, request)
        except ClientGone:
            raise
        except Exception as error:
            return _refusal(request, as_http(error, getattr(request.state, "words", {})))

    def _log(self, request: Request, status: int, begun: float, request_id: str | None) -> None:
        if self._front.config.log_requests:
            told = {
                "request_id": request_id,
                "method": request.method,
                "path": request.url.path,
                "status": status,
                "seconds": round(time.monotonic() - begun, 4),
            }
            requests_log.info(json.dumps(told))


def make_app(front: Front) -> Starlette:
    """Everything a server answers."""
    description = openapi.described((front.model, front.root), front.llm.vocab_size, (*ENDPOINTS, *CONTROL))

    async def show_description(request: Request) -> Response:
        return Response(description, media_type="application/json")

    routes = [Route(one.path, Door(front, one), methods=[one.method]) for one in (*ENDPOINTS, *CONTROL)]
    routes += [Route("/openapi.json", show_description), *page.routes()]
    origins = list(front.config.allowed_origins)
    middleware = [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])]
    return Starlette(
        routes=routes,
        middleware=middleware if origins else [],
        exception_handlers={HTTPException: _no_such_place},
    )


async def _no_such_place(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return _refusal(request, HTTPError(error.status_code, message, kind, headers=error.headers))


def _refusal(request: Request, error: HTTPError) -> Response:
    """Under the name that its body gave the request, if it could be read."""
    response = error.response()
    response.headers["X-Request-Id"] = getattr(request.state, "request_id", None) or new_id("refused")
    return response
