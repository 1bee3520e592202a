"""Whether jax can use the NVIDIA GPUs of this machine, found out without starting it."""

import ctypes.util
import importlib.util
import os
from pathlib import Path

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_DRIVER = Path("/proc/driver/nvidia/version")


def plugin_is_installed() -> bool:
    """Whether jax's CUDA plugin is here. The extra `aot` brings it along without the libraries that it needs to run anything."""
    return any(importlib.util.find_spec(name) for name in _PLUGINS)


def cuda_is_usable() -> bool:
    """Whether there are the plugin, a driver, and cuDNN, without which the plugin does not start."""
    if not plugin_is_installed() or not _DRIVER.exists():
        return False
    wheel = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None
    return wheel or ctypes.util.find_library("cudnn") is not None


def plugin_would_fail() -> bool:
    """Whether jax, left to choose, would try a plugin that cannot start, and print why. A choice in JAX_PLATFORMS stands."""
    return "JAX_PLATFORMS" not in os.environ and plugin_is_installed() and not cuda_is_usable()
