"""Who may import whom: docs/architecture.md."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The packages of jaxllm from the top down; one may import those below it, and those beside it in the same row are strangers.
LAYERS = [
    {"llm", "cli", "serve", "bench", "plan", "build", "beam_search", "__main__"},
    {"engine"},
    {"executor"},
    {"worker"},
    {"models", "sample", "weights", "tokenizer"},
    {"layers"},
    {"core"},
    {"outputs"},
    {"config", "sampling_params", "cuda", "trace"},
    {"parallel_config"},
    {"checks"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Front ends check requests against what the device rows can hold, and stand on the same level as beam search.
ALLOWED = {
    ("llm", "beam_search"),
    ("bench", "llm"),
    ("build", "plan"),
    ("cli", "llm"),
    ("__main__", "cli"),
    ("tokenizer", "weights"),
    ("beam_search", "llm"),
    ("serve", "beam_search"),
    ("cli", "serve"),
}
PURE = ("core", "config", "parallel_config", "checks", "sampling_params", "outputs", "trace")
THIRD_PARTY_HOMES = {
    "transformers": {"weights", "tokenizer", "multimodal"},
    "flax": {"layers", "models", "worker"},
    "orbax": {"weights"},
    "fastapi": {"serve"},
    "pydantic": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "uvloop": {"serve"},
    "aiohttp": {"bench"},
    "matplotlib": {"bench"},
    "msgspec": {"engine", "executor", "serve"},
    "zmq": {"engine", "executor"},
    "ray": {"engine"},
    "jax": {"executor", "worker", "models", "sample", "weights", "layers", "compat", "plan", "bench"},
}


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, but for those under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "jaxllm" else set()
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def home(path: Path) -> str:
    return path.relative_to(ROOT / "jaxllm").parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    "path", [path for path in sources("jaxllm") if path.name != "__init__.py" or path.parent.name != "jaxllm"]
)
def test_imports_go_downwards(path: Path):
    own = home(path)
    for module in imports_of(path):
        top, _, rest = module.partition(".")
        if top in THIRD_PARTY_HOMES:
            assert own in THIRD_PARTY_HOMES[top], f"{path} imports {module}"
        if top in ("jaxllm", "kernels_pallas", "sharding") and own in PURE:
            assert top == "jaxllm", f"{path} imports {module}"
            assert rest.partition(".")[0] in PURE, f"{path} imports {module}"
        if top != "jaxllm" or not rest:
            continue
        other = rest.partition(".")[0]
        if other != own and (own, other) not in ALLOWED:
            assert LEVEL[own] < LEVEL[other], f"{path} imports {module}"


@pytest.mark.parametrize("package", ["kernels_pallas", "sharding"])
def test_device_packages_know_nothing_of_the_engine(package: str):
    for path in sources(package):
        for module in imports_of(path):
            top = module.partition(".")[0]
            others = {"jax", "numpy", "llvmlite", "triton", "jax_triton"}
            assert top in {package, *others, *sys.stdlib_module_names}, f"{path} imports {module}"


def test_importing_jaxllm_starts_no_backend():
    code = (
        "import sys, jaxllm; from jaxllm import SamplingParams, EngineArgs; import jaxllm.core.scheduler; "
        "import jaxllm.engine.async_llm, jaxllm.engine.core_proc, jaxllm.executor.multiproc; "
        "assert 'jax' not in sys.modules and 'transformers' not in sys.modules, sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_front_end_imports_quickly(tmp_path: Path):
    """Processor seconds, from compiled bytecode as anywhere but here: the best of three, since others use the machine too."""
    code = "import time; start = time.process_time(); from jaxllm import LLM, AsyncLLM; print(time.process_time() - start)"
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    runs = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=60) for _ in range(4)]
    assert min(float(run.stdout) for run in runs[1:]) <= 0.4


def test_no_file_is_two_ideas():
    for package in ("jaxllm", "kernels_pallas", "sharding", "tests", "examples"):
        for path in sources(package):
            assert len(path.read_text().splitlines()) <= 560, f"{path} has grown too long"
