"""`/tokenize` and `/detokenize`: the ids that a prompt or a conversation becomes here, and the text of ids."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from perdure import InvalidValue
from perdure.server import prompts
from perdure.server.bodies import read
from perdure.server.calling import shown
from perdure.server.front import Front
from perdure.server.protocol.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from perdure.server.replies import json_response


async def tokenize(front: Front, request: Request) -> Response:
    body = await read(request, TokenizeRequest, front.config.max_body_bytes)
    front.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidValue("prompt and messages: give one of them")
    if body.prompt is not None:
        (prompt,) = await prompts.of_completion(front.llm, body.prompt, body.add_special_tokens)
    else:
        (prompt,) = await prompts.of_chats(
            front.llm,
            [body.messages or []],
            add_generation_prompt=body.add_generation_prompt,
            tools=None if body.tools is None else [shown(tool) for tool in body.tools],
            chat_template_kwargs=body.chat_template_kwargs,
        )
    tokenizer, strings = front.llm.tokenizer, None
    if body.return_token_strs and tokenizer is not None:
        strings = [tokenizer.id_to_piece(token_id) for token_id in prompt.token_ids]
    count = len(prompt.token_ids)
    return json_response(
        Tokenized(count=count, max_model_len=front.max_model_len, tokens=prompt.token_ids, token_strs=strings)
    )


async def detokenize(front: Front, request: Request) -> Response:
    body = await read(request, DetokenizeRequest, front.config.max_body_bytes)
    front.check_model(body.model)
    tokenizer = front.llm.tokenizer
    if tokenizer is None:
        raise InvalidValue("the model came without a tokenizer")
    width = front.llm.vocab_size
    wrong = next((one for one in body.tokens if not 0 <= one < width), None)
    if wrong is not None:
        raise InvalidValue(f"tokens holds {wrong}, which is no id from 0 to {width - 1}")
    return json_response(Detokenized(prompt=tokenizer.decode(body.tokens, False)))
