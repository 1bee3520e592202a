"""What each mistake of a caller gets."""

import json
from typing import Any

import httpx
import pytest
from sse import chunks
from toy_engine import EOS, VOCAB_SIZE
from toy_server import MAX_MODEL_LEN, ServerThread

from jaxllm.engine.errors import QueueOverflowError, RequestFailedError
from jaxllm.serve.errors import ApiError, from_value_error, to_api_error, validation_error
from jaxllm.serve.protocol.completion import CompletionRequest

JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def error_of(response: httpx.Response, status: int, type: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (status, type)
    assert error["message"]
    assert "Traceback" not in response.text
    return error


BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "must be provided"),
    ({"prompt": ""}, "prompt", "must be provided"),
    ({"prompt": []}, "prompt", "must be provided"),
    ({"prompt": [[]]}, "prompt", "must not be empty"),
    ({"prompt": ["Hello", ""]}, "prompt", "must not be empty"),
    ({"prompt": [VOCAB_SIZE]}, "prompt", "out of vocabulary"),
    ({"prompt": [-1]}, "prompt", "out of vocabulary"),
    ({"prompt": [[5], [VOCAB_SIZE]]}, "prompt", "out of vocabulary"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"prompt": [5] * (MAX_MODEL_LEN + 1)}, "input_tokens", "maximum context length is 512 tokens"),
    ({"prompt": [5] * MAX_MODEL_LEN}, "input_tokens", "max_tokens must be at least 1, got 0"),
    ({"prompt": "word " * 100_000}, "input_text", "500000 characters"),
    ({"max_tokens": MAX_MODEL_LEN + 1}, "max_tokens", "max_tokens=513 cannot be greater than max_model_len=512"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -1}, "max_tokens", "at least 1"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "at most max_tokens"),
    ({"temperature": -0.1}, "temperature", "(parameter=temperature, value=-0.1)"),
    ({"temperature": 2.1}, "temperature", "in [0, 2]"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"min_p": 1.5}, "min_p", "[0, 1]"),
    ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
    ({"frequency_penalty": -3}, "frequency_penalty", "[-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"n": 0}, "n", "[1, 16384]"),
    ({"n": 2, "temperature": 0}, "n", "greedy"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"logprobs": -2}, "logprobs", "at least -1"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "vocabulary"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", "vocabulary"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    ({"bad_words": [""]}, "bad_words", "non-empty"),
    ({"logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids", "vocabulary"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream_interval": 0}, "stream_interval", "at least 1"),
    ({"seed": 2**63}, "body.seed", "less than or equal"),
    ({"priority": 1}, "priority", "must be 0"),
    ({"cache_salt": ""}, "cache_salt", "non-empty"),
    ({"cache_salt": "a/b"}, "cache_salt", "must not contain"),
    ({"cache_salt": "a" * 129}, "cache_salt", "at most 128"),
    ({"vllm_xargs": {"a": 2**64}}, "vllm_xargs", "2**64"),
    ({"repetition_detection": {"max_pattern_size": 0}}, "repetition_detection", "at least 1"),
    ({"repetition_detection": {}}, "body.repetition_detection", "Field required"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"best_of": 3}, "best_of", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"use_beam_search": True, "stream": True}, "use_beam_search", "cannot be streamed"),
    ({"use_beam_search": True, "n": 11}, "n", "beam_width must be at most half"),
    ({"length_penalty": 2.0}, "length_penalty", "needs use_beam_search"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), BAD_COMPLETIONS, ids=lambda value: str(value)[:60])
def test_completions(client: httpx.Client, fields: dict[str, Any], param: str | None, message: str):
    for stream in (False, True):
        body = {"prompt": "Hello", "stream": stream, **fields}
        type = "Bad Request" if (param or "").startswith("body.") else "BadRequestError"
        if stream and ("stream_options" in fields or (param == "n" and "use_beam_search" in fields)):
            continue
        error = error_of(client.post("/v1/completions", json=body), 400, type)
        assert error["param"] == param
        assert message in error["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "messages[0].content[0]: 'image_url' parts are"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages", "input_audio"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "needs 'text'"),
    ({"messages": [{"content": "a"}]}, "body.messages", "Field required"),
    ({"messages": "Hello"}, "body.messages", "valid list"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages",
        "arguments must be JSON",
    ),
    ({"messages": [{"role": "user", "content": "word " * 200_000}]}, "input_text", "characters"),
    ({"messages": [{"role": "user", "content": "ab " * 600}]}, "input_tokens", "maximum context length"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_completion_tokens": 513}, "max_completion_tokens", "cannot be greater"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "at least -1"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "logprobs=true"),
    ({"tools": []}, "tools", "must not be empty"),
    ({"tools": [{"type": "function"}]}, "body.tools", "Field required"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "not supported"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "not supported"),
    ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt=false"),
    ({"chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "no variable of a template"),
    ({"chat_template_kwargs": {"return_dict": True}}, "chat_template_kwargs", "no variable of a template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "no variable of a template"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"n": 2, "temperature": 0}, "n", "greedy"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), BAD_CHATS, ids=lambda value: str(value)[:60])
def test_chat(client: httpx.Client, fields: dict[str, Any], param: str | None, message: str):
    type = "Bad Request" if (param or "").startswith("body.") else "BadRequestError"
    error = error_of(client.post("/v1/chat/completions", json={"messages": USER, **fields}), 400, type)
    assert error["param"] == param
    assert message in error["message"]


BAD_RESPONSES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": ""}, "input", "must not be empty"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
    ({"input": [{"type": "computer_call"}]}, "input", "computer_call"),
    ({"input": [{"type": "message", "content": "a"}]}, "input", "needs a role"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input", "valid string"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
    ({"background": True}, "background", "stores no responses"),
    ({"text": {"format": {"type": "json_object"}}}, "text", "not supported"),
    ({"include": ["file_search_call.results"]}, "include", "not supported"),
    ({"truncation": "auto"}, "truncation", "not supported"),
    ({"tools": [{"type": "web_search"}]}, "tools", "only functions"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"temperature": 3}, "temperature", "[0, 2]"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD_RESPONSES, ids=lambda value: str(value)[:60])
def test_responses(client: httpx.Client, fields: dict[str, Any], param: str, message: str):
    response = client.post("/v1/responses", json={"input": "Hello", **fields})
    error = error_of(response, 400, "Bad Request" if "valid string" in message else "BadRequestError")
    assert error["param"].split(".")[0] == param
    assert message in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_request(client: httpx.Client, path: str):
    for content in (b'{"model": ', b"", b"\xff\xfe", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"):
        error = error_of(client.post(path, content=content, headers=JSON), 400, "Bad Request")
        assert (error["param"] or "").startswith("body") or error["param"] is None
    for value in ([], "x", 3, None):
        error_of(client.post(path, json=value), 400, "Bad Request")
    for media_type in ("text/plain", "application/x-www-form-urlencoded"):
        error = error_of(client.post(path, content=b"{}", headers={"content-type": media_type}), 400, "Bad Request")
        assert error["param"] == "Content-Type"


def test_types(client: httpx.Client):
    error = error_of(client.post("/v1/completions", json={"prompt": "a", "temperature": "x", "top_k": 0.5}), 400, "Bad Request")
    assert error["param"] == "body.temperature"
    assert error["message"].startswith("2 validation errors:\n  body.temperature: ")
    error = error_of(client.post("/v1/completions", json={"prompt": {"a": "x" * 1000}}), 400, "Bad Request")
    assert error["param"] == "body.prompt"
    assert len(error["message"]) < 1000
    # JSON as Python reads it knows NaN; no parameter does.
    response = client.post("/v1/completions", content='{"prompt": "a", "temperature": NaN}', headers=JSON)
    error_of(response, 400, "BadRequestError")
    for half in ('{"prompt": "\\ud800"}', '{"prompt": "a", "stop": "\\uDC00"}', '{"prompt": "a", "request_id": "\\udfff"}'):
        response = client.post("/v1/completions", content=half, headers=JSON)
        assert "valid Unicode" in error_of(response, 400, "BadRequestError")["message"]
    pair = '{"prompt": "\\ud83d\\ude00", "max_tokens": 1, "echo": true}'
    response = client.post("/v1/completions", content=pair, headers=JSON)
    assert response.json()["choices"][0]["text"].startswith("😀")


def test_models_and_routes(client: httpx.Client):
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/responses", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        error = error_of(client.post(path, json={**body, "model": "gpt"}), 404, "NotFoundError")
        assert error["param"] == "model"
        assert error["message"] == "The model `gpt` does not exist. Valid aliases: toy."
    error_of(client.get("/v1/models/gpt"), 404, "NotFoundError")
    error_of(client.get("/v1/nothing"), 404, "Not Found")
    error_of(client.get("/v1/completions"), 405, "Method Not Allowed")
    error_of(client.post("/sleep?level=3"), 400, "Bad Request")
    error_of(client.post("/wake_up?tags=nothing"), 400, "BadRequestError")


def test_over_capacity():
    server = ServerThread(config={"max_num_queued_reqs": 2})
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for path, body in (
                ("/v1/completions", {"prompt": "a", "n": 3}),
                ("/v1/chat/completions", {"messages": USER, "n": 3}),
            ):
                response = client.post(path, json=body)
                error_of(response, 503, "Service Unavailable")
                assert int(response.headers["retry-after"]) >= 1
                assert client.post(path, json={**body, "stream": True}).status_code == 503
            # Of several prompts all or none: the two that fit are aborted.
            error_of(client.post("/v1/completions", json={"prompt": ["a", "b", "c"]}), 503, "Service Unavailable")
            assert client.post("/v1/completions", json={"prompt": ["a", "b"]}).status_code == 200
            counted = [
                line for line in client.get("/metrics").text.splitlines() if line.startswith("jaxllm:admission_rejections_total")
            ]
            assert [line.rpartition(" ")[2] for line in counted if "max_num_queued_reqs" in line] == ["5.0"]
    finally:
        assert server.stop() == 0


def test_the_end_of_sequence_token_is_a_prompt_like_any_other(client: httpx.Client):
    assert client.post("/v1/completions", json={"prompt": [EOS], "max_tokens": 1}).status_code == 200


def test_an_error_in_a_stream_ends_it(client: httpx.Client, server: ServerThread, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any) -> Any:
        raise KeyError("an accident")

    monkeypatch.setattr(server.context, "usage", broken)
    body = {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    last = chunks(client.post("/v1/completions", json=body))[-1]
    assert last == {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
    # Outside of a stream it is the status.
    error_of(client.post("/v1/completions", json={"prompt": "a"}), 500, "InternalServerError")


def test_errors_without_a_server():
    body = CompletionRequest(prompt="a", temperature=3)
    error = from_value_error(ValueError("temperature must be in [0, 2], got 3"), body)
    assert (error.status, error.param) == (400, "temperature")
    assert from_value_error(ValueError("max_tokens is wrong"), body, {"max_tokens": "max_completion_tokens"}).param is None
    assert "0x7f00" not in from_value_error(ValueError("<object at 0x7f001234abcd>")).message
    assert to_api_error(QueueOverflowError("full")).status == 503
    assert to_api_error(RequestFailedError("gone")).status == 500
    own = ApiError(418, "Teapot", "short and stout")
    assert to_api_error(own) is own
    many = validation_error([{"loc": ("body", "a"), "msg": "bad", "type": "x", "input": i} for i in range(12)])
    assert many.message.startswith("12 validation errors")
    assert many.message.endswith("and 2 more")
    assert json.loads(ApiError(400, "a", "\ud800").json())["error"]["message"] == "\ud800"
