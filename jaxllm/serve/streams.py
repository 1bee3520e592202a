"""Outputs of the engine as they come, and server-sent events made of them. Both end when the client goes."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.engine.errors import RequestFailedError
from jaxllm.engine.input_processor import TokensPrompt
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine.async_llm import AsyncLLM

DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the access log does
KEEP_ALIVE = b": keep-alive\n\n"

to_json = msgspec.json.Encoder().encode


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + to_json(data) + b"\n\n"


class JsonResponse(Response):
    """A JSON body, encoded quickly."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


@dataclass(slots=True)
class EngineRequest:
    """One prompt of a call.

    Attributes:
        data_parallel_rank: the engine that is to run it; None for any.
    """

    request_id: str
    prompt: TokensPrompt
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    trace_headers: dict[str, str] | None = None
    data_parallel_rank: int | None = None


class EngineStream:
    """The outputs of the prompts of one call, in the order in which they come: `async for position, output in stream`.

    Call `start` first and `aclose` in the end, which aborts what still runs.

    Args:
        response_id: what the client knows of the call.
        on_close: called in the end.
    """

    def __init__(
        self, engine: "AsyncLLM", response_id: str, requests: Sequence[EngineRequest], on_close: Callable[["EngineStream"], None]
    ) -> None:
        self.response_id = response_id
        self.engine_ids = [request.request_id for request in requests]
        self.on_close = on_close
        self.generators = [
            engine.generate(
                request.prompt,
                request.params,
                request.request_id,
                priority=request.priority,
                cache_salt=request.cache_salt,
                trace_headers=request.trace_headers,
                data_parallel_rank=request.data_parallel_rank,
            )
            for request in requests
        ]
        self.num_unfinished = len(requests)
        self._pumps: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue(len(requests))
        self._first: tuple[int, RequestOutput] | None = None

    async def start(self) -> None:
        """Wait for the first output.

        Raises:
            Whatever the engine has against a prompt: it can still become the status of the response.
        """
        if len(self.generators) > 1:
            self._pumps = [asyncio.create_task(self._pump(i, generator)) for i, generator in enumerate(self.generators)]
        self._first = await self._next()

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        item = self._first
        assert item is not None, "call start first"
        while True:
            self.num_unfinished -= item[1].finished
            yield item
            if not self.num_unfinished:
                return
            item = await self._next()

    async def _next(self) -> tuple[int, RequestOutput]:
        if not self._pumps:
            output = await anext(self.generators[0], None)
            if output is None:
                raise RequestFailedError("the engine gave up on the request")
            return 0, output
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def _pump(self, position: int, generator: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async for output in generator:
                await self._queue.put((position, output))
        except Exception as error:
            await self._queue.put(error)

    async def aclose(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)
        for generator in self.generators:
            await generator.aclose()
        self.on_close(self)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(work: asyncio.Task[Any], receive: Receive) -> bool:
    """Wait for `work`, or cancel it if the client goes. Returns whether it was done."""
    listener = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({work, listener}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        for task in (work, listener):
            if not task.done():
                task.cancel()
        await asyncio.wait({work, listener})


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Make a response, or stop making it when the client goes: then there is nobody to read it."""
    task = asyncio.create_task(work)
    if await _first_of(task, request.receive):
        return task.result()
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class EventStream(Response):
    """Server-sent events.

    Args:
        events: the bytes of each.
        stream: closed in the end, however that comes.
        on_error: the events that tell the client of an error.
        keep_alive: seconds of silence after which a comment is sent; 0 for never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        stream: EngineStream,
        on_error: Callable[[Exception], bytes],
        keep_alive: float = 0.0,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self.stream = stream
        self.on_error = on_error
        self.keep_alive = keep_alive
        self.last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            work = asyncio.create_task(self._send_all(send))
            if await _first_of(work, receive):
                work.result()
        finally:
            await self.events.aclose()
            await self.stream.aclose()

    async def _send_all(self, send: Send) -> None:
        self.last_sent = time.monotonic()
        keeper = asyncio.create_task(self._keep_alive(send)) if self.keep_alive else None
        try:
            try:
                async for data in self.events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self.last_sent = time.monotonic()
            except Exception as error:
                await send({"type": "http.response.body", "body": self.on_error(error), "more_body": True})
        finally:
            if keeper is not None:
                keeper.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silence = time.monotonic() - self.last_sent
            if silence >= self.keep_alive:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self.last_sent = time.monotonic()
            else:
                await asyncio.sleep(self.keep_alive - silence)
