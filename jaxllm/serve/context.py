"""What the handlers of all endpoints share."""

import dataclasses
import importlib.metadata
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from jaxllm.engine.input_processor import InputProcessor
from jaxllm.engine.metrics import Counter
from jaxllm.outputs import RequestOutput, RequestStateStats
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.serve.args import ServeArgs
from jaxllm.serve.chat_prompt import ChatRenderer, load_chat_template
from jaxllm.serve.errors import bad_request, shutting_down, unknown_model
from jaxllm.serve.parsers import OutputParser
from jaxllm.serve.prompts import PromptEncoder
from jaxllm.serve.protocol.base import GenerationBody, RequestMetrics, Usage
from jaxllm.serve.protocol.responses import ResponsesRequest
from jaxllm.serve.shared_metrics import SharedMetrics
from jaxllm.serve.streams import EngineRequest, EngineStream

if TYPE_CHECKING:
    from jaxllm.config import EngineConfig
    from jaxllm.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_LEN = 128
REQUEST_ID = "jaxllm.request_id"  # in an ASGI scope: the id that was made for a request without one
ENGINE_HEADER = "X-data-parallel-rank"
TRACE_HEADERS = ("traceparent", "tracestate")


def version() -> str:
    try:
        return importlib.metadata.version("jaxllm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that is not installed


@dataclass(slots=True)
class Call:
    """One call of a client: what its response says on every line.

    Attributes:
        base_id: the client's own id, or a random one.
        id: of the response.
        created: seconds, `time.time()`.
        data_parallel_rank: the engine that is to run it, if the client has a wish.
    """

    base_id: str
    id: str
    created: int
    model: str
    trace_headers: dict[str, str] | None
    data_parallel_rank: int | None


class Context:
    """
    Args:
        engine: already running.
        config: the engine's.
    """

    def __init__(self, engine: "AsyncLLM", config: "EngineConfig", tokenizer: Any, args: ServeArgs) -> None:
        self.engine = engine
        self.config = config
        self.tokenizer = tokenizer
        self.args = args
        self.model_names: Sequence[str] = args.served_model_name or (config.model.model,)
        self.started = int(time.time())
        self.version = version()
        self.fingerprint = f"jaxllm-{self.version}"
        self.max_model_len = config.model.max_model_len
        self.generation_defaults = dict(config.model.generation_defaults)
        self.encoder = PromptEncoder(tokenizer, self.max_model_len)
        self.input_processor = InputProcessor(config, tokenizer)
        self.renderer = ChatRenderer(
            tokenizer,
            chat_template=load_chat_template(args.chat_template) if args.chat_template else None,
            content_format=args.chat_template_content_format,  # type: ignore[arg-type]  # checked at birth
            default_kwargs=args.default_chat_template_kwargs,
            trust_request_templates=args.trust_request_chat_template,
        )
        self.streams: set[EngineStream] = set()
        self.num_open = 0  # HTTP requests
        self.http_requests: dict[tuple[str, str, int], Counter] = {}  # by method, route and status
        self.is_stopping = False
        self.shared_metrics: SharedMetrics | None = None  # if this is one of several servers

    def check_model(self, model: str | None) -> str:
        """The name that responses carry.

        Raises:
            ApiError: 404, if the request names another model.
        """
        if model and model not in self.model_names:
            raise unknown_model(model, self.model_names)
        return model or self.model_names[0]

    def begin(self, prefix: str, body: GenerationBody | ResponsesRequest, request: Request) -> Call:
        """
        Raises:
            ApiError: if the server stops, or the request names another model, or an engine that is none.
        """
        if self.is_stopping:
            raise shutting_down()
        model = self.check_model(body.model)
        made = request.scope.get(REQUEST_ID) or uuid.uuid4().hex
        base_id = (request.headers.get("x-request-id") or body.request_id or made)[:MAX_REQUEST_ID_LEN]
        trace = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
        response_id = base_id if base_id.startswith(prefix) else prefix + base_id
        return Call(base_id, response_id, int(time.time()), model, trace or None, self._wanted_engine(request))

    def _wanted_engine(self, request: Request) -> int | None:
        text = request.headers.get(ENGINE_HEADER)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal()):
            raise bad_request(f"{ENGINE_HEADER} must be a number, got {text!r}", ENGINE_HEADER)
        return int(text)  # the engine checks it

    def open(self, call: Call, requests: Sequence[EngineRequest]) -> EngineStream:
        """A stream of the engine's outputs, known to `abort` until it is closed."""
        stream = EngineStream(self.engine, call.id, requests, self.streams.discard)
        self.streams.add(stream)
        if self.args.enable_log_requests:
            for one in requests:
                text = one.prompt.get("prompt")
                shown = self.cut(text) if text is not None else None
                ids = one.prompt["prompt_token_ids"]
                logger.info("request %s: %d prompt tokens, %r, %s", one.request_id, len(ids), shown, one.params)
        return stream

    def log_output(self, call: Call, index: int, text: str, finish_reason: str | None) -> None:
        if self.args.enable_log_outputs:
            logger.info("response %s, choice %d: %r, finish reason %s", call.id, index, self.cut(text), finish_reason)

    def cut(self, text: str) -> str:
        return text if self.args.max_log_len is None else text[: self.args.max_log_len]

    async def abort(self, response_ids: Iterable[str] | None = None) -> int:
        """End calls: they get what there is so far, with finish reason "abort".

        Args:
            response_ids: None for all.

        Returns:
            How many calls that were.
        """
        wanted = None if response_ids is None else set(response_ids)
        found = [stream for stream in self.streams if wanted is None or stream.response_id in wanted]
        if found:
            await self.engine.abort([engine_id for stream in found for engine_id in stream.engine_ids])
        return len(found)

    def check_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Check several prompts before the first is queued: the engine would see them one by one.

        Raises:
            ValueError: naming what is wrong with the first that is.
        """
        for one in requests:
            checked = dataclasses.replace(one.params, skip_clone=False)
            self.input_processor.process_inputs(one.request_id, one.prompt, checked, None, one.priority, one.cache_salt)

    def sampling_params(self, body: GenerationBody, max_tokens: int, **fields: Any) -> SamplingParams:
        """The request's own parameters over what the model recommends.

        Raises:
            ValueError: naming the field.
        """
        defaults = {name: value for name, value in self.generation_defaults.items() if name != "max_tokens"}
        given = {**defaults, **body.sampling_fields(), **{name: value for name, value in fields.items() if value is not None}}
        kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**given, max_tokens=max_tokens, output_kind=kind, skip_clone=True)

    def output_parser(self, prompt: str, *, tools: bool, include_reasoning: bool = True, parallel: bool = True) -> OutputParser:
        """What tells reasoning, content and tool calls of one choice apart."""
        return OutputParser(
            prompt, self.args.reasoning_parser, self.args.tool_call_parser if tools else None, include_reasoning, parallel
        )

    def check_tools(self, wants_tools: bool) -> None:
        """
        Raises:
            ApiError: if tools are to be called and no parser finds the calls.
        """
        if wants_tools and not self.args.enable_auto_tool_choice:
            raise bad_request(
                '"auto" tool choice requires the server to run with --enable-auto-tool-choice and --tool-call-parser',
                "tool_choice",
            )

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        usage: Usage = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }
        if self.args.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage

    def wants_usage(self, body: GenerationBody) -> tuple[bool, bool]:
        """(in a chunk at the end of a stream, in every chunk)"""
        options = body.stream_options
        if self.args.enable_force_include_usage:
            return True, True
        if options is None or not options.include_usage:
            return False, False
        return True, bool(options.continuous_usage_stats)

    def request_metrics(self, output: RequestOutput) -> dict[str, RequestMetrics]:
        """`{"metrics": …}` where responses carry it, else nothing."""
        if not self.args.enable_per_request_metrics or output.metrics is None:
            return {}
        return {"metrics": request_metrics(output.metrics)}


def request_metrics(stats: RequestStateStats) -> RequestMetrics:
    """Times that did not happen are 0."""
    started, answered = stats.scheduled_ts > 0, stats.first_token_ts > 0
    generation = 1000 * (stats.last_token_ts - stats.first_token_ts) if answered else 0.0
    return {
        "queue_time_ms": 1000 * (stats.scheduled_ts - stats.queued_ts) if started else 0.0,
        "time_to_first_token_ms": 1000 * (stats.first_token_ts - stats.scheduled_ts) if started and answered else 0.0,
        "generation_time_ms": generation,
        "mean_itl_ms": generation / max(1, stats.num_generation_tokens - 1),
    }
