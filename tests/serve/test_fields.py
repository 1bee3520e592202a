"""Every field of vLLM's requests is honoured, refused where it would change the answer, or ignored with one warning."""

import logging
from typing import Any

import pytest

from jaxllm.serve.beams import EXCLUDED
from jaxllm.serve.errors import ApiError
from jaxllm.serve.protocol import base
from jaxllm.serve.protocol.base import RequestBody
from jaxllm.serve.protocol.chat import ChatCompletionRequest
from jaxllm.serve.protocol.completion import CompletionRequest
from jaxllm.serve.protocol.responses import ResponsesRequest

SAMPLING = """
    n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens logit_bias
    allowed_token_ids bad_words prompt_logprobs logprob_token_ids use_beam_search length_penalty truncate_prompt_tokens
    truncation_side
"""
COMMON = """
    model stream stream_options response_format priority request_id cache_salt return_tokens_as_token_ids return_token_ids
    repetition_detection stream_interval vllm_xargs
"""
COMMON_REFUSED = """
    watermarking structured_outputs kv_transfer_params ec_transfer_params thinking_token_budget return_token_offsets
    return_weight_versions routed_experts_prompt_start
"""

# (model, honoured, refused, ignored): the fields of vLLM 0.33, by what happens to them here.
KINDS: list[tuple[type[RequestBody], str, str, str]] = [
    (
        CompletionRequest,
        SAMPLING + COMMON + "prompt echo logprobs max_tokens add_special_tokens",
        COMMON_REFUSED + "suffix prompt_embeds mm_payload",
        "user session_id",
    ),
    (
        ChatCompletionRequest,
        SAMPLING
        + COMMON
        + """messages logprobs top_logprobs max_tokens max_completion_tokens tools tool_choice reasoning_effort include_reasoning
        parallel_tool_calls echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
        chat_template_kwargs return_prompt_text""",
        COMMON_REFUSED,
        "user session_id media_io_kwargs mm_processor_kwargs",
    ),
    (
        ResponsesRequest,
        """input model instructions max_output_tokens parallel_tool_calls reasoning stream temperature text tool_choice tools
        top_logprobs top_p truncation include request_id priority cache_salt top_k logit_bias skip_special_tokens""",
        "background previous_response_id prompt previous_input_messages enable_response_messages",
        "max_tool_calls metadata service_tier store user mm_processor_kwargs",
    ),
]
REQUIRED: dict[type[RequestBody], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
    ResponsesRequest: {"input": "a"},
}


@pytest.mark.parametrize(("model", "honoured", "refused", "ignored"), KINDS)
def test_every_field_is_of_one_kind(model: type[RequestBody], honoured: str, refused: str, ignored: str):
    kinds = [set(honoured.split()), set(refused.split()), set(ignored.split())]
    assert sum(map(len, kinds)) == len(set.union(*kinds))
    assert kinds[0] <= set(model.model_fields)
    assert kinds[1] <= set(model.REFUSED)
    assert kinds[2] <= set(model.IGNORED)
    assert not set(model.model_fields) & (set(model.REFUSED) | model.IGNORED)
    assert not set(model.REFUSED) & model.IGNORED


@pytest.mark.parametrize(("model", "name"), [(model, name) for model, *_ in KINDS for name in model.REFUSED])
def test_refused_fields(model: type[Any], name: str):
    with pytest.raises(ApiError) as caught:
        model(**REQUIRED[model], **{name: {"a": 1}}).check()
    assert (caught.value.status, caught.value.param) == (400, name)
    assert f"{name} is not supported: {model.REFUSED[name]}" in caught.value.message
    for nothing in (None, False, 0, "", [], {}):
        model(**REQUIRED[model], **{name: nothing}).check()


@pytest.mark.parametrize("model", REQUIRED)
def test_ignored_fields_are_warned_of_once(model: type[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            model(**REQUIRED[model], user="me", nonsense=1).check()
    assert [record.getMessage() for record in caplog.records] == [
        "the field 'user' of a request is ignored: it changes nothing here; this is said once",
        "the field 'nonsense' of a request is ignored: it is unknown; this is said once",
    ]
    # Clients that make names up do not fill the log.
    for i in range(300):
        model(**REQUIRED[model], **{f"x{i}": 1}).check()
    assert len(caplog.records) == base.MAX_WARNED_FIELDS


def test_fields_that_beam_search_does_not_know_exist():
    assert set(EXCLUDED) <= set(CompletionRequest.model_fields)
