"""A live server for most tests."""

from collections.abc import Iterator

import httpx
import pytest
from toy_server import ServerThread


@pytest.fixture(scope="session")
def server() -> Iterator[ServerThread]:
    """Over the toy engine, with everything switched on that only adds to responses."""
    server = ServerThread(
        dev_mode=True,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        enable_prompt_tokens_details=True,
        enable_request_id_headers=True,
        config={"max_num_seqs": 64},
    )
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="session")
def client(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client
