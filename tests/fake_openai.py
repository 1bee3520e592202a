"""An OpenAI server whose answers and delays are known: a thread of the test, or a process (`python fake_openai.py --port N`)."""

import argparse
import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon"]


@dataclass
class FakeServer:
    """
    Attributes:
        ttft, itl: seconds before the first chunk and between two.
        saturation: requests under way up to which `itl` holds; it grows in proportion beyond.
        slots: requests that run at once; others wait. None for no limit.
        tokens_per_chunk: that `usage` counts.
        usage: whether the last chunk tells the counts.
        status, broken_after: fail: with an HTTP status, or by an error after so many chunks.
        drop_after: close the connection after so many chunks.
        answer: instead of WORDS, over and over.
        reasoning: comes before the answer, in chat.
        piece: bytes that are written at once, instead of an event.
        api_key: what /v1 wants; None for nothing.
        healthy: what /health says.
        metrics: body of GET /metrics; None for 404.
        static: folder with the web page.
        seen: (path, headers, body) of every POST.
    """

    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "fake", "root": "fake"}])
    ttft: float = 0.0
    itl: float = 0.0
    saturation: int = 1_000_000
    slots: int | None = None
    tokens_per_chunk: int = 1
    usage: bool = True
    status: int = 200
    broken_after: int | None = None
    drop_after: int | None = None
    answer: list[str] | None = None
    reasoning: str | None = None
    piece: int | None = None
    api_key: str | None = None
    healthy: bool = True
    metrics: Callable[[], str | None] = lambda: None
    static: Path | None = None
    seen: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    num_resets: int = 0
    url: str = ""

    def app(self) -> web.Application:
        self._gate = asyncio.Semaphore(self.slots or 1_000_000)
        app = web.Application(middlewares=[self._check_key])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/reset_prefix_cache", self._reset)
        if self.static is not None:
            app.router.add_get("/", self._page)
            app.router.add_static("/", self.static)
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Callable[[web.Request], Any]) -> Any:
        right = self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}"
        if request.path.startswith("/v1/") and not right:
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = self.metrics()
        return web.Response(status=404) if text is None else web.Response(text=text)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _page(self, request: web.Request) -> web.FileResponse:
        assert self.static is not None
        return web.FileResponse(self.static / "index.html")

    async def _reset(self, request: web.Request) -> web.Response:
        self.num_resets += 1
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.path, dict(request.headers), body))
        if self.status != 200:
            error = {"message": "the fake server refuses", "type": "BadRequestError", "param": None, "code": self.status}
            return web.json_response({"error": error}, status=self.status)
        async with self._gate:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                return await self._stream(request, body)
            finally:
                self.running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        count = body.get("max_completion_tokens", body.get("max_tokens", 5))
        words = self.answer if self.answer is not None else [" " + WORDS[i % len(WORDS)] for i in range(count)]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def send(data: dict[str, Any] | str) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            event = b"data: " + text.encode() + b"\n\n"
            for start in range(0, len(event), self.piece or len(event)):
                await response.write(event[start : start + (self.piece or len(event))])

        if chat:
            await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.ttft)
        if chat and self.reasoning is not None:
            await send({"choices": [{"index": 0, "delta": {"reasoning": self.reasoning}}]})
        chunks = ["".join(words[i : i + self.tokens_per_chunk]) for i in range(0, len(words), self.tokens_per_chunk)]
        for i, text in enumerate(chunks):
            if i:
                await asyncio.sleep(self.itl * max(1.0, self.running / self.saturation))
            if i == self.broken_after:
                await send({"error": {"message": "the fake engine died", "type": "InternalServerError", "code": 500}})
                await send("[DONE]")
                return response
            if i == self.drop_after:
                assert request.transport is not None
                request.transport.close()
                return response
            content = {"delta": {"content": text}} if chat else {"text": text}
            reason = "length" if i == len(chunks) - 1 else None
            chunk: dict[str, Any] = {"choices": [{"index": 0, **content, "finish_reason": reason}]}
            if body.get("stream_options", {}).get("continuous_usage_stats"):
                chunk["usage"] = self._usage(body, min((i + 1) * self.tokens_per_chunk, len(words)))
            await send(chunk)
        if self.usage and body.get("stream_options", {}).get("include_usage"):
            await send({"choices": [], "usage": self._usage(body, len(words))})
        await send("[DONE]")
        return response

    def _usage(self, body: dict[str, Any], num_tokens: int) -> dict[str, int]:
        prompt = body["prompt"] if "prompt" in body else " ".join(message["content"] for message in body["messages"])
        num_prompt = len(prompt.split() if isinstance(prompt, str) else prompt)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Run it in a thread, on a port of its own; `server.url` is its address."""
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()

    async def run() -> None:
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        server.url = f"http://{host}:{port}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--itl", type=float, default=0.0)
    parser.add_argument("--saturation", type=int, default=1_000_000)
    args = parser.parse_args()
    server = FakeServer(itl=args.itl, saturation=args.saturation, slots=args.max_num_seqs)

    async def app() -> web.Application:
        return server.app()

    web.run_app(app(), host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
