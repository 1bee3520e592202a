"""Errors as clients see them: a status and `{"error": {"message", "type", "param", "code"}}`. Never a stack trace."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from jaxllm.engine.errors import AdmissionError, EngineDeadError, EngineLostError, RequestFailedError

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
MAX_LISTED_ERRORS = 10
MAX_SHOWN_VALUE = 80

# What the engine calls a field, where a request calls it otherwise.
_FIELD_NAMES = {"extra_args": "vllm_xargs", "prompt_token_ids": "prompt", "beam_width": "n"}


class ApiError(Exception):
    """What a client gets instead of an answer.

    Attributes:
        status: the HTTP status.
        type: a word for programs, "BadRequestError" and the like.
        param: the field of the request that is at fault; None if it is no single one.
        headers: to send along.
    """

    def __init__(
        self, status: int, type: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}

    def json(self) -> bytes:
        """ASCII only: a message may quote half of a surrogate pair, which has no UTF-8."""
        return json.dumps(self.body()).encode()

    def response(self) -> Response:
        return Response(self.json(), self.status, self.headers, "application/json")


def shown(value: object) -> str:
    """A value as an error quotes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_VALUE else text[:MAX_SHOWN_VALUE] + "…"


_NO_VALUE = object()


def bad_request(message: str, param: str | None = None, value: object = _NO_VALUE) -> ApiError:
    """A 400. Given a field, the message ends with it and, if given, its value."""
    if param is not None and value is not _NO_VALUE:
        message = f"{message} (parameter={param}, value={shown(value)})"
    return ApiError(400, "BadRequestError", message, param)


def not_supported(param: str, value: object, why: str) -> ApiError:
    """The 400 for a field that would change the answer and cannot be honoured."""
    return bad_request(f"{param} is not supported: {why}", param, value)


def unknown_model(model: str, names: Sequence[str]) -> ApiError:
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(names)}."
    return ApiError(404, "NotFoundError", message, "model")


def internal_error() -> ApiError:
    return ApiError(500, "InternalServerError", "Internal server error")


def http_error(status: int, detail: str | None = None, headers: Mapping[str, str] | None = None) -> ApiError:
    """An error of HTTP itself: no such route, a method that is not allowed."""
    phrase = HTTPStatus(status).phrase
    return ApiError(status, phrase, detail or phrase, headers=headers)


def over_capacity(error: Exception) -> ApiError:
    return ApiError(503, HTTPStatus(503).phrase, str(error), headers={"retry-after": str(RETRY_AFTER_SECONDS)})


def shutting_down() -> ApiError:
    return over_capacity(RuntimeError("The server is shutting down"))


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """A 400 from what pydantic or the JSON parser found: types, missing fields, syntax."""
    lines = []
    for error in errors[:MAX_LISTED_ERRORS]:
        where = ".".join(str(part) for part in error["loc"])
        if error["type"] in ("missing", "json_invalid"):
            value = f": {error['ctx']['error']}" if "ctx" in error else ""
        else:
            value = f" (value={shown(error.get('input'))})"
        lines.append(f"  {where}: {error['msg']}{value}")
    if len(errors) > MAX_LISTED_ERRORS:
        lines.append(f"  and {len(errors) - MAX_LISTED_ERRORS} more")
    count = f"{len(errors)} validation error{'s' if len(errors) != 1 else ''}"
    param = ".".join(part for part in errors[0]["loc"][:2] if isinstance(part, str)) if errors else None
    return ApiError(400, HTTPStatus(400).phrase, f"{count}:\n" + "\n".join(lines), param)


def from_value_error(error: Exception, body: BaseModel | None = None, aliases: Mapping[str, str] | None = None) -> ApiError:
    """A 400 from an error of the engine's own checks, whose messages begin with the field at fault.

    Args:
        aliases: more names that the request has for fields of the engine.
    """
    message = re.sub(r"\b0x[0-9a-fA-F]{6,}\b", "0x…", str(error))
    match = re.match(r"[a-z_]+", message)
    name = match[0] if match else ""
    name = {**_FIELD_NAMES, **(aliases or {})}.get(name, name)
    if body is None or name not in type(body).model_fields:
        return bad_request(message)
    return bad_request(message, name, getattr(body, name))


def to_api_error(error: Exception, body: BaseModel | None = None, aliases: Mapping[str, str] | None = None) -> ApiError:
    """What to tell the client. Errors that nobody foresaw are logged here, with their trace."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, AdmissionError):
        return over_capacity(error)
    if isinstance(error, ValueError | OverflowError):
        return from_value_error(error, body, aliases)
    if isinstance(error, EngineLostError):
        return ApiError(500, "InternalServerError", f"The engine of this request has died: {error}")
    if isinstance(error, EngineDeadError):
        return ApiError(500, "InternalServerError", "The engine has died; the server is going down")
    if isinstance(error, RequestFailedError):
        return ApiError(500, "InternalServerError", str(error))
    logger.error("a request failed", exc_info=error)
    return internal_error()
