"""The examples, run as they are, on engines with few and small buckets: compiling and loading others would take minutes."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import jaxllm

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.usefixtures("memory_is_released")


@pytest.fixture(autouse=True)
def compiled(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples keep compiled programs where the user's cache is; here, where the other tests keep theirs."""
    assert pytestconfig.cache is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytestconfig.cache.mkdir("home")))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "cudagraph_capture_sizes": [], "compile_sizes": []}
    for name in ("LLM", "EngineArgs"):
        made = getattr(jaxllm, name)
        monkeypatch.setattr(jaxllm, name, lambda *args, made=made, **kwargs: made(*args, **{**kwargs, **few}))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    load(name).main()
    return capsys.readouterr().out


def test_every_example_has_a_test():
    tested = set(re.findall(r'run\("(\w+)"', Path(__file__).read_text()))
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


def test_examples_fit_a_page():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path


def test_offline(capsys):
    assert "'The capital of France is' -> ' Paris." in run("offline", capsys)


def test_streams(capsys):
    lines = dict(line.split(": ", 1) for line in run("streams", capsys).splitlines())
    assert lines.keys() == {"capital", "water", "given up"}
    assert "Paris" in lines["capital"]
    assert lines["given up"].count("|") == 2


def test_chat(capsys):
    out = run("chat", capsys)
    assert "Paris" in out
    cached = [int(n) for n in re.findall(r"\((\d+) prompt tokens came from the cache\)", out)]
    assert cached[0] == 0
    assert cached[1] >= 32


def test_batch_params(capsys):
    lines = run("batch_params", capsys).splitlines()
    texts = [line.partition(": ")[2] for line in lines]
    assert len(lines) == 9
    assert texts[1] == texts[2]
    assert len(set(texts[3:6])) == 3
    assert re.search(r"\.'? ?.*\(stop\)", texts[7])
    assert " little" not in texts[8]


def test_logprobs(capsys):
    out = run("logprobs", capsys)
    assert "' Paris'" in out
    assert re.search(r"' capital'\s+\d+\.\d+%, rank \d+", out)


def test_prefix_caching(capsys):
    shares = [int(share) for share in re.findall(r"(\d+)% of the prompt was cached", run("prefix_caching", capsys))]
    assert shares[0] == 0
    assert min(shares[1:]) > 80


def test_demo(capsys):
    out = run("demo", capsys)
    assert "Paris" in out
    match = re.search(r"8 requests, \d+ prompt tokens, (\d+) output tokens .* hit rate (\d+\.\d+)%", out)
    assert match
    assert int(match[1]) > 100
    assert float(match[2]) > 30


def test_the_example_of_the_readme(capsys):
    readme = (EXAMPLES.parent / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert code
    assert 'LLM("smollm2-135m-instruct")' in code[1]
    exec(compile(code[1], "README.md", "exec"), {"__name__": "__main__"})
    assert " Paris." in capsys.readouterr().out
