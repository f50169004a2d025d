"""Endpoints of the server that TRL had before it took vLLM's: generating, and weights tensor by tensor.

Its client announces a tensor, is answered, and broadcasts it then; so what goes wrong is told by the next call. The
engine gets all tensors with `/reset_prefix_cache`, which that client sends after the last, or before it generates.
"""

from __future__ import annotations

from typing import get_args

import torch
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from perdure import InvalidValue, PerdureError, RequestOutput, SamplingParams, StateError
from perdure.api.output import CompletionOutput
from perdure.server import control, prompts, vllm_group
from perdure.server.batch import Batch, unless_gone
from perdure.server.bodies import read
from perdure.server.front import Front
from perdure.server.protocol.control import Broadcast, Done, DtypeName, Nothing, TensorShape
from perdure.server.protocol.vllm import (
    ConversationsRequest,
    Generated,
    GenerateRequest,
    InitCommunicatorRequest,
    NamedTensorRequest,
    TrlSampling,
)
from perdure.server.replies import error_of, json_response
from perdure.server.scores import SCORE_OF_NOTHING

SERVER, CLIENT = 0, 1
"""Ranks: the server joins alone, whatever stands behind it."""
_DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)
WORDS = {
    "prompt": "prompts",
    "structured_outputs.regex": "structured_outputs_regex",
}


async def generate(front: Front, request: Request) -> Response:
    body = await read(request, GenerateRequest, front.config.max_body_bytes)
    request.state.words = WORDS
    settings = _settings(body)
    asked = await prompts.of_completion(front.llm, list(body.prompts), True)
    return await _generated(front, request, body, settings, asked)


async def chat(front: Front, request: Request) -> Response:
    body = await read(request, ConversationsRequest, front.config.max_body_bytes)
    request.state.words = WORDS
    settings = _settings(body)
    tools, others = body.tools or None, body.chat_template_kwargs
    asked = await prompts.of_chats(front.llm, body.messages, tools=tools, chat_template_kwargs=others)
    if not asked:
        raise InvalidValue("messages=[] holds no conversation")
    return await _generated(front, request, body, settings, asked)


async def _generated(
    front: Front, request: Request, body: TrlSampling, settings: SamplingParams, asked: list[prompts.Prompt]
) -> Response:
    if (most := body.truncate_prompt_tokens) not in (None, -1):
        asked = [one._replace(token_ids=one.token_ids[-most:] if most else []) for one in asked]
    await front.announced.apply(front.llm)
    batch = await Batch.of(front, asked, settings, None, "generate", None)
    results = await unless_gone(request, batch.results(), batch.abort)
    outputs = [output for result in results for output in _outputs(result)]
    told = Generated(
        prompt_ids=[one.token_ids for one in batch.prompts],
        completion_ids=[output.token_ids for output in outputs],
        logprobs=None,
    )
    if body.logprobs is UNSET:
        told.logprobs = [[max(one, SCORE_OF_NOTHING) for one in output.selected_logprobs or ()] for output in outputs]
    elif settings.logprobs is None:
        told.logprob_token_ids = None
    else:
        ranked = [_ranked(output) for output in outputs]
        told.logprobs = [[[score for _, score in best] for best in scores] for scores in ranked]
        told.logprob_token_ids = [[[token for token, _ in best] for best in scores] for scores in ranked]
    return json_response(told, batch.request_id)


def _settings(body: TrlSampling) -> SamplingParams:
    """generation_kwargs come last, as any of `SamplingParams`."""
    names = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")
    given = {name: getattr(body, name) for name in names}
    given["logprobs"] = 0 if body.logprobs is UNSET else body.logprobs
    given |= body.generation_kwargs
    if (regex := body.structured_outputs_regex or body.guided_decoding_regex) is not None:
        given["structured_outputs"] = {"regex": regex}
    for name in given:
        if name not in SamplingParams.__struct_fields__ or name in ("output_kind", "logits_processors"):
            raise InvalidValue(f"generation_kwargs has {name[:80]!r}, which is no setting that is taken here")
    return SamplingParams(**given)


def _outputs(result: RequestOutput | PerdureError) -> list[CompletionOutput]:
    if (error := error_of(result)) is not None:
        raise error
    assert isinstance(result, RequestOutput)
    return result.outputs


def _ranked(output: CompletionOutput) -> list[list[tuple[int, float]]]:
    """Of each token the ids that were scored, the likeliest first."""
    found = []
    for at in output.logprobs or ():
        scores = [(id_, max(one.logprob, SCORE_OF_NOTHING)) for id_, one in (at or {}).items()]
        found.append(sorted(scores, key=lambda one: -one[1]))
    return found


async def init_communicator(front: Front, request: Request) -> Response:
    body: InitCommunicatorRequest = await control.body_of(front, request, InitCommunicatorRequest)
    if body.world_size != CLIENT + 1:
        raise InvalidValue(f"world_size={body.world_size} is not {CLIENT + 1}: this server and one trainer")
    if torch.cuda.is_available() and body.client_device_uuid == str(torch.cuda.get_device_properties("cuda").uuid):
        raise InvalidValue("client_device_uuid is the GPU of this server: NCCL needs one for each side")
    if not vllm_group.is_possible():
        raise InvalidValue(vllm_group.MISSING)
    front.announced.forget()
    front.leave()  # of a client before, which may have gone without a word
    joining = front.begin_to_join(vllm_group.join(body.host, body.port, SERVER, body.world_size, with_barrier=True))
    joining.add_done_callback(lambda task: task.cancelled() or task.exception())  # the next call says what went wrong
    return json_response(Done())


async def update_named_param(front: Front, request: Request) -> Response:
    body: NamedTensorRequest = await control.body_of(front, request, NamedTensorRequest)
    dtype = next((name for name in _DTYPES if name == body.dtype.removeprefix("torch.")), None)
    if dtype is None:
        raise InvalidValue(f"dtype={body.dtype[:80]!r} is none of {', '.join(_DTYPES)}")
    if not front.has_group:
        raise StateError("there is no group for weights: POST /init_communicator/ first")
    asked = Broadcast(tensors=[TensorShape(name=body.name, dtype=dtype, shape=body.shape)], root=CLIENT)
    front.announced.announce(lambda: front.received(asked))
    return json_response(Done())


async def close_communicator(front: Front, request: Request) -> Response:
    """Harmless if there is none. What came and was not asked for yet is forgotten."""
    await control.body_of(front, request, Nothing)
    front.announced.forget()
    front.leave()
    return json_response(Done())
