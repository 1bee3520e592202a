"""Engines for the end-to-end tests: a tiny model with random weights, and the real one."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_configs import LAYERS_2

from jaxllm import LLM


@pytest.fixture(scope="session")
def compiled(pytestconfig: pytest.Config) -> str:
    """Compiled programs are kept from run to run beside pytest's own cache."""
    cache = pytestconfig.cache
    assert cache is not None
    return str(cache.mkdir("compiled"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(LAYERS_2))
    return str(folder)


MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def made() -> Iterator[list[LLM]]:
    """The engines of `make_tiny`."""
    made: list[LLM] = []
    yield made
    for llm in made:
        llm.shutdown()


@pytest.fixture(autouse=True)
def _engines_of_a_test_end_with_it(request: pytest.FixtureRequest) -> Iterator[None]:
    """XLA:CPU maps each function of a program by itself, and Linux allows a process 65530 mappings: few dozen engines."""
    if "make_tiny" not in request.fixturenames:
        yield
        return
    made = request.getfixturevalue("made")
    num_before = len(made)  # those of the module's own fixtures, which are set up before
    yield
    for llm in made[num_before:]:
        llm.shutdown()
    del made[num_before:]


@pytest.fixture(scope="module")
def make_tiny(tiny_model: str, compiled: str, made: list[LLM]) -> MakeLLM:
    """Make engines with the same random weights; they end with the test, or the module if a fixture of its makes them."""

    def make(**kwargs: Any) -> LLM:
        # The largest bucket of each kind alone, unless a test asks for more: compiling is most of the time of these tests.
        sizes = {"cudagraph_capture_sizes": [], "compile_sizes": []}
        limits = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "block_size": 4, "num_gpu_blocks_override": 1024}
        kwargs = {**sizes, **limits, **kwargs}
        llm = LLM(
            tiny_model,
            load_format="dummy",
            skip_tokenizer_init=True,
            compilation_cache_dir=compiled,
            use_tqdm_on_load=False,
            **kwargs,
        )
        made.append(llm)
        return llm

    return make


@pytest.fixture(scope="session")
def smollm2(compiled: str) -> Iterator[LLM]:
    """The real model, float32."""
    with LLM(
        "smollm2-135m-instruct",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        cudagraph_capture_sizes=[4],
        compile_sizes=[64],
        compilation_cache_dir=compiled,
        use_tqdm_on_load=False,
    ) as llm:
        yield llm


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """Outputs of the real model; see tests/data/golden/README.md."""
    path = Path(__file__).parents[1] / "data" / "golden" / "smollm2_f32.json"
    return json.loads(path.read_text())["items"]
