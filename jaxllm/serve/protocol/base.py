"""What the bodies of several endpoints share.

A field of a request is one of three: a field of the model, which is honoured; in `REFUSED`, which is an error where it would
change the answer; or else ignored, with one warning. `tests/serve/test_fields.py` lists all fields of vLLM's requests by kind.
"""

import logging
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from jaxllm.sampling_params import SamplingParams
from jaxllm.serve.errors import bad_request, not_supported

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = 4
MAX_WARNED_FIELDS = 100  # clients make names up; the log and the set of names must stay bounded
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

NO_STRUCTURED_OUTPUTS = "this server cannot constrain the output to a format"
NO_TRANSFER = "this server does not hand KV blocks to another"

_warned: set[str] = set()

Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]


class RequestBody(BaseModel):
    """
    Attributes:
        REFUSED: fields that cannot be honoured, and why. They are an error unless they hold null, false, 0 or nothing.
        IGNORED: fields that are known to change nothing here.
    """

    model_config = ConfigDict(extra="allow")

    REFUSED: ClassVar[dict[str, str]] = {}
    IGNORED: ClassVar[frozenset[str]] = frozenset()

    def check_other_fields(self) -> None:
        """Refuse or ignore what is no field of the model.

        Raises:
            ApiError: naming the field and its value.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self.REFUSED and value not in (None, False, 0, "", [], {}):
                raise not_supported(name, value, self.REFUSED[name])
            if name not in self.REFUSED and name not in _warned and len(_warned) < MAX_WARNED_FIELDS:
                _warned.add(name)
                why = "it changes nothing here" if name in self.IGNORED else "it is unknown"
                logger.warning("the field %.80r of a request is ignored: %s; this is said once", name, why)


class StreamOptions(BaseModel):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str


class RepetitionDetection(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class GenerationBody(RequestBody):
    """Fields of completions and chat completions alike. Where one is left out, the model's own recommendation counts."""

    REFUSED: ClassVar[dict[str, str]] = {
        "watermarking": "the sampler knows no watermarks",
        "structured_outputs": NO_STRUCTURED_OUTPUTS,
        "guided_json": NO_STRUCTURED_OUTPUTS,
        "guided_regex": NO_STRUCTURED_OUTPUTS,
        "guided_choice": NO_STRUCTURED_OUTPUTS,
        "guided_grammar": NO_STRUCTURED_OUTPUTS,
        "guided_json_object": NO_STRUCTURED_OUTPUTS,
        "thinking_token_budget": "the sampler cannot end a thought early",
        "kv_transfer_params": NO_TRANSFER,
        "ec_transfer_params": NO_TRANSFER,
        "return_token_offsets": "the tokenizer's offsets are not kept",
        "return_weight_versions": "weights have no versions",
        "routed_experts_prompt_start": "no model here has experts",
        "logits_processors": "this server runs no code of its callers",
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"user", "session_id", "guided_decoding_backend", "guided_whitespace_pattern"})

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetection | None = None
    stream_interval: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    response_format: ResponseFormat | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    @property
    def is_stream(self) -> bool:
        return bool(self.stream)

    def check(self) -> None:
        """The rules that types cannot say.

        Raises:
            ApiError: naming the field.
        """
        self.check_other_fields()
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs", self.prompt_logprobs)
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise bad_request(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", "stop")
        if self.response_format is not None and self.response_format.type != "text":
            raise not_supported("response_format", self.response_format.type, NO_STRUCTURED_OUTPUTS)
        if self.use_beam_search and self.stream:
            raise bad_request("use_beam_search cannot be streamed", "use_beam_search", True)
        if self.length_penalty != 1.0 and not self.use_beam_search:
            raise bad_request("length_penalty needs use_beam_search=true", "length_penalty", self.length_penalty)

    def sampling_fields(self) -> dict[str, Any]:
        """Those fields that the request set and that SamplingParams has too."""
        fields = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.vllm_xargs is not None:
            fields["extra_args"] = self.vllm_xargs
        if self.repetition_detection is not None:
            fields["repetition_detection"] = self.repetition_detection.model_dump()
        return fields


_SAMPLING_FIELDS = tuple(
    name
    for name in GenerationBody.model_fields
    if name in SamplingParams.__dataclass_fields__ and name not in ("repetition_detection", "prompt_logprobs")
)


# Responses are dicts. Keys that are left out are those that the request did not ask for.


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict, total=False):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ErrorInfo(TypedDict):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(TypedDict):
    error: ErrorInfo


class RequestMetrics(TypedDict):
    """Milliseconds of the engine: waiting to be scheduled, then to the first token, then to the last, and per token of that."""

    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float
    mean_itl_ms: float
