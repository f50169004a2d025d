"""Laying out a conversation by a model's own Jinja template, in a sandbox, as transformers does.

- A template comes with a model and is not trusted: it sees its arguments, a clock for its date line, and nothing else.
- Whatever makes a template fail is the messages' fault towards the caller: `InvalidValue`, one line.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from perdure.api.errors import InvalidValue
from perdure.api.sampling import is_unicode

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
TemplateKwargs = Mapping[str, Any]


def render(
    template: str,
    messages: Messages,
    add_generation_prompt: bool,
    tools: Tools | None,
    special_tokens: Mapping[str, str],
    template_kwargs: TemplateKwargs | None = None,
) -> str:
    """The text of a conversation. `special_tokens` gives templates their `bos_token`, `eos_token` and so on;
    template_kwargs: what else this template knows, such as `enable_thinking`."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    with refusing_bad_messages():
        return environment.from_string(template).render(
            **{**special_tokens, **(template_kwargs or {})},
            messages=list(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )


def checked_text(text: str) -> str:
    """What messages were laid out as, which must be text that can be made ids."""
    if not is_unicode(text):
        raise InvalidValue("messages hold a text that is not valid Unicode")
    return text


def refuse_missing_template() -> NoReturn:
    """For a tokenizer whose files hold no template."""
    raise InvalidValue("this model has no chat template; give a prompt instead of messages")


@contextmanager
def refusing_bad_messages() -> Iterator[None]:
    """Turns any failure of a template into a refusal of the messages."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidValue(f"the chat template refused the messages: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error's kind and the first line of its message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which models have not seen in training.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
