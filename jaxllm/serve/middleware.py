"""What happens to every HTTP request before a handler sees it. Plain ASGI, so that disconnects come through."""

import hashlib
import hmac
import json
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.engine.metrics import METRIC_PREFIX, Counter
from jaxllm.serve.context import MAX_REQUEST_ID_LEN, REQUEST_ID
from jaxllm.serve.errors import http_error

if TYPE_CHECKING:
    from jaxllm.serve.context import Context


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


class CountMiddleware:
    """Counts requests: those that are open, and those that ended by route and status. Sends X-Request-Id back if wanted."""

    def __init__(self, app: ASGIApp, context: "Context") -> None:
        self.app = app
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 499
        echo = self._request_id(scope) if self.context.args.enable_request_id_headers else None

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if echo is not None:
                    message = {**message, "headers": [*message["headers"], (b"x-request-id", echo)]}
            await send(message)

        self.context.num_open += 1
        try:
            await self.app(scope, receive, send_and_note)
        finally:
            self.context.num_open -= 1
            self._count(scope, status)

    def _request_id(self, scope: Scope) -> bytes:
        given = header(scope, b"x-request-id")
        if given:
            return given[:MAX_REQUEST_ID_LEN]
        made = uuid.uuid4().hex
        scope[REQUEST_ID] = made
        return made.encode()

    def _count(self, scope: Scope, status: int) -> None:
        # The route's path, not the client's: the number of counters must stay bounded.
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        counters, key = self.context.http_requests, (method, route, status)
        if key not in counters:
            labels = {"method": method, "handler": route, "status": str(status)}
            counters[key] = Counter(METRIC_PREFIX + "http_requests", "HTTP requests by route and status.", labels=labels)
        counters[key].value += 1


class ApiKeyMiddleware:
    """Lets requests under /v1, and /scale, in only with one of the keys.

    Args:
        keys: at least one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or self._is_open(scope) or self._is_known(scope):
            await self.app(scope, receive, send)
            return
        body = json.dumps({"error": "Unauthorized"})
        await Response(body, 401, {"www-authenticate": "Bearer"}, "application/json")(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return not (path in ("/v1", "/scale") or path.startswith("/v1/"))

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All of them, each in constant time: how long this takes tells nothing about the keys.
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return scheme.lower() == b"bearer" and any(matches)


class BodyLimitMiddleware:
    """Refuses larger bodies with 413: at once if the request says so, else when they have become too large.

    Args:
        limit: bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit
        self.message = f"The body of a request may have at most {limit} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = header(scope, b"content-length")
        if length is not None and int(length) > self.limit:
            # The body is not read, so the connection cannot be used again.
            await http_error(413, self.message, {"connection": "close"}).response()(scope, receive, send)
            return
        received = 0

        async def receive_and_count() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self.limit:
                    raise HTTPException(413, self.message, {"connection": "close"})
            return message

        await self.app(scope, receive_and_count, send)
