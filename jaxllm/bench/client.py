"""A client of OpenAI servers that notes when each chunk arrives.

It is made with aiohttp, whose parser is compiled: a load client must not become what is measured. With 64 streams at once it
takes 25 to 50 µs of CPU a chunk, where httpx takes 70 to 110.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from jaxllm.bench.datasets import SampleRequest
from jaxllm.bench.metrics import RequestRecord

Backend = Literal["openai", "openai-chat"]
ENDPOINTS: dict[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
# Longer than any request should take; vLLM's.
DEFAULT_TIMEOUT = 6 * 60 * 60.0
_MAX_ERROR_CHARS = 500


class NoServerError(ValueError):
    """Nobody answers at the address."""


@dataclass(frozen=True)
class RequestOptions:
    """What all requests of a run have in common.

    Attributes:
        sampling: fields of the body, such as temperature.
        extra_body: more fields; they replace others.
        openai_fields_only: leave out what only vLLM and jaxllm know: repetition_penalty and ignore_eos.
    """

    model: str
    ignore_eos: bool = False
    logprobs: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    openai_fields_only: bool = False
    request_id_prefix: str = "bench-"


def request_body(backend: Backend, request: SampleRequest, options: RequestOptions) -> dict[str, Any]:
    """The JSON body of a streaming request.

    Raises:
        ValueError: for a prompt of token ids on the chat backend.
    """
    body: dict[str, Any] = {"model": options.model, "stream": True, "stream_options": {"include_usage": True}}
    if backend == "openai":
        body |= {"prompt": request.prompt, "max_tokens": request.output_len}
        if options.logprobs is not None:
            body["logprobs"] = options.logprobs
        if not options.openai_fields_only:
            # A model's own default would make the output depend on who serves it.
            body["repetition_penalty"] = 1.0
    else:
        if not isinstance(request.prompt, str):
            raise ValueError("--backend openai-chat cannot send token ids, which --dataset-name timed_trace has")
        body |= {"messages": [{"role": "user", "content": request.prompt}], "max_completion_tokens": request.output_len}
        if options.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": options.logprobs}
    if options.ignore_eos and not options.openai_fields_only:
        body["ignore_eos"] = True
    return body | dict(options.sampling) | dict(options.extra_body)


def is_output(choice: Mapping[str, Any]) -> bool:
    """Whether a chunk's choice counts as output: any does, even with an empty text (a special token, half a character), but for
    the chunk that only opens a chat message with its role."""
    delta = choice.get("delta")
    if not isinstance(delta, Mapping) or "role" not in delta or choice.get("finish_reason"):
        return True
    return any(value for name, value in delta.items() if name != "role") or bool(choice.get("token_ids"))


class EventParser:
    """Server-sent events from the bytes of a response, however they are cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that these bytes complete. Comments and other fields are dropped."""
        # A \r may be the first half of a line's end, so it waits for the next byte.
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return [found for event in events if (found := _data_of(event))]

    def close(self) -> list[bytes]:
        """The data of a last event that no blank line ended."""
        event, self._rest = self._rest.strip(), b""
        return [found] if (found := _data_of(event)) else []


def _data_of(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class OpenAIClient:
    """Talks to one server. Use it as an async context manager.

    Args:
        base_url: such as http://127.0.0.1:8000, without /v1.
        endpoint: by default that of the backend.
        headers: for every request. OPENAI_API_KEY of the environment is sent as a bearer token unless there is one among these.
        timeout: seconds for a whole request.
        insecure: do not check the server's certificate.
    """

    def __init__(
        self,
        base_url: str,
        backend: Backend = "openai",
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        insecure: bool = False,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url must begin with http:// or https://, got {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self.backend: Backend = backend
        self.url = self.base_url + (endpoint or ENDPOINTS[backend])
        self._headers = dict(headers or {})
        if (key := os.environ.get("OPENAI_API_KEY")) and "authorization" not in map(str.lower, self._headers):
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._insecure = insecure

    async def __aenter__(self) -> "OpenAIClient":
        # No limit of its own: the load decides how many requests are under way.
        connector = aiohttp.TCPConnector(limit=0, ssl=not self._insecure)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def models(self) -> list[dict[str, Any]]:
        """What GET /v1/models lists; nothing if the server has no such route.

        Raises:
            NoServerError: if nobody answers.
            ValueError: if something else than an OpenAI server does.
        """
        try:
            async with self._session.get(self.base_url + "/v1/models") as response:
                if response.status == 404:
                    return []
                if response.status != 200:
                    raise ValueError(f"GET {response.url}: {await _error_of(response)}")
                body = json.loads(await response.read())
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise NoServerError(
                f"no server answers at {self.base_url} ({_reason(error)}); start one with `python -m jaxllm.serve`, "
                "or name another with --base-url"
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.base_url}/v1/models gives no JSON: is it an OpenAI server?") from error
        models = body.get("data") if isinstance(body, dict) else None
        if not isinstance(models, list) or any(not isinstance(model, dict) or "id" not in model for model in models):
            raise ValueError(f"{self.base_url}/v1/models lists no models: is it an OpenAI server?")
        return models

    async def get_text(self, path: str) -> str | None:
        """The body of GET `path`; None if the server has none."""
        try:
            async with self._session.get(self.base_url + path) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def post(self, path: str) -> bool:
        """POST without a body. Returns whether the server did it."""
        try:
            async with self._session.post(self.base_url + path) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def send(self, request: SampleRequest, options: RequestOptions, request_id: str) -> RequestRecord:
        """Send a request and read its stream to the end. What goes wrong is in the record; nothing is raised for it."""
        body = json.dumps(request_body(self.backend, request, options)).encode()
        headers = {"Content-Type": "application/json", "x-request-id": request_id}
        record = RequestRecord(request.prompt_len)
        record.start = time.perf_counter()
        try:
            async with self._session.post(self.url, data=body, headers=headers) as response:
                if response.status != 200:
                    record.error = await _error_of(response)
                else:
                    await self._read(response, record)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            record.error = _reason(error)
        if not record.chunk_times and not record.error:
            record.error = "the stream ended without any output"
        return record

    async def _read(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        parser, texts = EventParser(), []
        async for data in response.content.iter_any():
            now = time.perf_counter()
            for event in parser.feed(data):
                _note(event, now, record, texts)
        now = time.perf_counter()
        for event in parser.close():
            _note(event, now, record, texts)
        record.text = "".join(texts)


def _note(event: bytes, now: float, record: RequestRecord, texts: list[str]) -> None:
    """Put what an event says into the record."""
    if event == b"[DONE]":
        return
    try:
        chunk = json.loads(event)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        record.error = record.error or f"not a JSON object in the stream: {event[:80]!r}"
        return
    if "error" in chunk:
        record.error = record.error or _message(chunk)
        return
    if usage := chunk.get("usage"):
        if (count := usage.get("completion_tokens")) is not None:
            record.output_len = count
        if (count := usage.get("prompt_tokens")) is not None:
            record.prompt_len = count
    if choices := chunk.get("choices"):
        choice = choices[0]
        if is_output(choice):
            record.chunk_times.append(now)
            texts.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


async def _error_of(response: aiohttp.ClientResponse) -> str:
    """Status and message of an answer that is not 200."""
    text = (await response.text(errors="replace")).strip()
    try:
        message = _message(json.loads(text))
    except ValueError:
        message = text
    return f"HTTP {response.status} {response.reason or ''}: {message[:_MAX_ERROR_CHARS]}".rstrip(": ")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    number = getattr(error, "errno", None)
    return (os.strerror(number) if isinstance(number, int) else str(error)) or type(error).__name__
