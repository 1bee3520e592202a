"""Requests made up from the OpenAPI schema. Whatever they hold, none is the server's fault."""

from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from toy_server import ServerThread

ESSENTIAL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [70, 71]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "SAY[Hello]YAS"}]},
    "/v1/responses": {"input": "SAY[Hello]YAS"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [70, 71]},
}
BOUNDED = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("path", ESSENTIAL)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_no_request_is_a_server_error(server: ServerThread, client: httpx.Client, path: str, mode: schemathesis.GenerationMode):
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    statuses: Counter[int] = Counter()

    @BOUNDED
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode), data=st.data())
    def send(case: schemathesis.Case, data: st.DataObject) -> None:
        if isinstance(case.body, dict) and data.draw(st.booleans()):
            # Something to answer, and few other fields: some of these requests are in order.
            names = data.draw(st.lists(st.sampled_from(sorted(case.body) or [""]), max_size=2))
            case.body = {**{name: value for name, value in case.body.items() if name in names}, **ESSENTIAL[path]}
        response = case.call(base_url=server.url, timeout=20)
        statuses[response.status_code] += 1
        assert response.status_code in (200, 400, 404, 405, 413), (response.status_code, response.text)
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    send()
    assert statuses[200] or mode is schemathesis.GenerationMode.NEGATIVE
    assert not server.engine.errored
    assert client.get("/health").status_code == 200


def test_the_schema_names_every_field(client: httpx.Client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert {"prompt", "temperature", "cache_salt", "vllm_xargs"} <= set(schemas["CompletionRequest"]["properties"])
    assert {"messages", "tools", "chat_template_kwargs"} <= set(schemas["ChatCompletionRequest"]["properties"])
    assert {"choices", "usage"} <= set(schemas["ChatCompletionResponse"]["properties"])
