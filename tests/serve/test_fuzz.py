"""Requests made up from the OpenAPI schema. Whatever they hold, none is the server's fault."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from toy_server import ServerThread

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
BOUNDED = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_no_request_is_a_server_error(server: ServerThread, client: httpx.Client, path: str, mode: schemathesis.GenerationMode):
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    operation = schema[path]["POST"]

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        response = case.call(base_url=server.url, timeout=20)
        assert response.status_code in (200, 400, 404, 405, 413), (response.status_code, response.text)
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    send()
    assert not server.engine.errored
    assert client.get("/health").status_code == 200


def test_the_schema_names_every_field(client: httpx.Client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert {"prompt", "temperature", "cache_salt", "vllm_xargs"} <= set(schemas["CompletionRequest"]["properties"])
    assert {"messages", "tools", "chat_template_kwargs"} <= set(schemas["ChatCompletionRequest"]["properties"])
    assert {"choices", "usage"} <= set(schemas["ChatCompletionResponse"]["properties"])
