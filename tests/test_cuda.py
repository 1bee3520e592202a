"""What is found out about CUDA without starting jax."""

from pathlib import Path

import pytest

from jaxllm import cuda


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine with some of plugin, driver and cuDNN."""

    def make(*parts: str) -> None:
        found = {"jax_cuda13_plugin": "plugin" in parts, "nvidia": True, "nvidia.cudnn": "cudnn" in parts}
        monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object() if found.get(name) else None)
        monkeypatch.setattr(cuda.ctypes.util, "find_library", lambda name: None)
        monkeypatch.setattr(cuda, "_DRIVER", tmp_path if "driver" in parts else tmp_path / "missing")
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    return make


@pytest.mark.parametrize(
    ("parts", "usable", "would_fail"),
    [
        ((), False, False),
        (("driver",), False, False),
        (("plugin",), False, True),  # what the extra `aot` makes of a machine without a GPU
        (("plugin", "driver"), False, True),  # and of one with a GPU
        (("plugin", "cudnn"), False, True),
        (("plugin", "driver", "cudnn"), True, False),
    ],
)
def test_usable(machine, parts: tuple[str, ...], usable: bool, would_fail: bool):
    machine(*parts)
    assert cuda.cuda_is_usable() == usable
    assert cuda.plugin_would_fail() == would_fail


def test_a_choice_of_platform_stands(machine, monkeypatch: pytest.MonkeyPatch):
    machine("plugin")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert not cuda.plugin_would_fail()
