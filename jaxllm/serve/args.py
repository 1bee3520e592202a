"""ServeArgs: what a server needs to know beside its engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.serve.parsers import REASONING_PARSERS, TOOL_PARSERS


@dataclass
class ServeArgs:
    """Names and defaults are those of `vllm serve`.

    Attributes:
        host: the address to listen on; every one of the machine by default.
        port: 0 takes a free one, which is printed.
        uds: a path: listen on a Unix socket instead.
        root_path: where a proxy mounts the server.
        api_key: keys that calls under /v1 must bring; also taken from JAXLLM_API_KEY.
        allowed_origins, allowed_methods, allowed_headers: CORS.
        allow_credentials: CORS.
        ssl_keyfile, ssl_certfile, ssl_ca_certs: files, to serve HTTPS.
        served_model_name: the names of the model in the API, the first of which responses carry; by default that of --model.
        chat_template: a file or the template itself, instead of the model's.
        chat_template_content_format: what templates get as content: auto, string or openai (a list of parts).
        default_chat_template_kwargs: JSON; variables of the template, which requests can override.
        trust_request_chat_template: take templates from requests.
        response_role: the role of answers.
        enable_auto_tool_choice: let models call tools; needs --tool-call-parser.
        tool_call_parser: hermes or llama3_json.
        exclude_tools_when_tool_choice_none: do not show tools to the model if it may not call them.
        reasoning_parser: deepseek_r1 or qwen3: tells thoughts from answers.
        return_tokens_as_token_ids: write tokens of log probabilities as token_id:N.
        enable_prompt_tokens_details: count cached tokens in usage.
        enable_force_include_usage: send usage in every stream.
        enable_per_request_metrics: send times with usage.
        enable_request_id_headers: send X-Request-Id back.
        sse_keep_alive_interval: seconds of silence after which a stream gets a comment; 0 for never.
        max_body_size: bytes; larger requests get 413.
        dev_mode: serve the endpoints that control the engine; never on an open network.
        disable_fastapi_docs: no /docs and no /openapi.json.
        vllm_metric_names: begin the names of metrics with vllm: instead of jaxllm:, so that dashboards made for vLLM work.
        enable_log_requests, enable_log_outputs: log prompts and parameters, and answers.
        max_log_len: characters of a prompt or answer in the log.
        disable_uvicorn_access_log: do not log every call.
        uvicorn_log_level: debug, info, warning, error or critical: what the HTTP server itself logs.
        api_server_count: processes that serve HTTP, before the same engines.
        headless: serve nothing: this machine has engines of the server at --data-parallel-address, or workers (--node-rank).
        shutdown_timeout: seconds that open requests get when the server is told to stop.
    """

    host: str | None = None
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    api_key: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str | None = None
    return_tokens_as_token_ids: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    enable_request_id_headers: bool = False
    sse_keep_alive_interval: float = 0.0
    max_body_size: int = 2**26
    dev_mode: bool = False
    disable_fastapi_docs: bool = False
    vllm_metric_names: bool = False
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    max_log_len: int | None = None
    disable_uvicorn_access_log: bool = False
    uvicorn_log_level: str = "info"
    shutdown_timeout: float = 0.0
    api_server_count: int = 1
    headless: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be in [0, 65535], got {self.port}")
        if self.api_server_count < 1:
            raise ValueError(f"--api-server-count must be at least 1, got {self.api_server_count}")
        if self.headless and self.api_server_count > 1:
            raise ValueError(f"--headless serves nothing: --api-server-count must be 1, got {self.api_server_count}")
        if self.max_body_size < 1:
            raise ValueError(f"--max-body-size must be at least 1, got {self.max_body_size}")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ValueError(f"--max-log-len must be at least 0, got {self.max_log_len}")
        for name in ("shutdown_timeout", "sse_keep_alive_interval"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} must be at least 0 seconds, got {value}")
        for name, value, choices in (
            ("--chat-template-content-format", self.chat_template_content_format, ("auto", "string", "openai")),
            ("--uvicorn-log-level", self.uvicorn_log_level, ("debug", "info", "warning", "error", "critical")),
            ("--tool-call-parser", self.tool_call_parser, (None, *TOOL_PARSERS)),
            ("--reasoning-parser", self.reasoning_parser, (None, *REASONING_PARSERS)),
        ):
            if value not in choices:
                known = ", ".join(choice for choice in choices if choice is not None)
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("--enable-auto-tool-choice needs --tool-call-parser")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile go together")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"--root-path must begin with a slash and not end with one, got {self.root_path!r}")
        if not self.response_role:
            raise ValueError("--response-role must not be empty")
