"""Keys: who may ask for answers, and who may control. They are compared without telling by time how far they fit."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Literal

from starlette.requests import Request

from perdure.server.config import ServeConfig
from perdure.server.errors import HTTPError

Access = Literal["open", "api", "control"]


def check(request: Request, access: Access, config: ServeConfig) -> None:
    """Raises `HTTPError` 401 or 403."""
    if access == "open" or (access == "api" and not config.api_keys) or (access == "control" and config.open_control):
        return
    keys = config.control_keys if access == "control" else (*config.api_keys, *config.control_keys)
    if not keys:
        raise HTTPError(
            403,
            "control is closed: start the server with --control-key, or with --open-control for everybody",
            "permission_error",
            code="control_closed",
        )
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not _is_one_of(key.strip(), keys):
        of = "control" if access == "control" else "API"
        raise HTTPError(
            401,
            f"this needs `Authorization: Bearer KEY` with one of the server's {of} keys",
            "authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _is_one_of(given: str, keys: Sequence[str]) -> bool:
    found = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
    return any(found)
