"""Compiled programs on disk. A program that is there is loaded without being traced, lowered or compiled.

jax's own persistent cache saves the compiler's work only; tracing thirty layers a bucket takes as long again. What a program
depends on goes into its name, the source code included, so a program that does not fit is simply not found.
"""

import ctypes
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import secrets
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

CompilerOptions = dict[str, str | bool]

MAX_BYTES = 4 * 2**30
# Where code lies that a step is traced from.
_SOURCES = (
    "jaxllm/config.py",
    "jaxllm/parallel_config.py",
    "jaxllm/layers",
    "jaxllm/models",
    "jaxllm/sample",
    "jaxllm/worker",
    "kernels_pallas",
    "sharding",
)


def step_options(platform: str) -> CompilerOptions | None:
    """XLA's options for a step, but for those that the user has set in XLA_FLAGS.

    On a GPU loops go into the command buffer too, so that a step is one launch. Outside of it the host would wait at every loop
    and conditional (the sampler's, for one) until the device has come there, and no step could be dispatched before the end of
    the last. A kernel that is fused with the slices of its operands would be outside too.

    Rematerialization is off: a KV cache that fills the memory is more than XLA lets arguments be (80 % of the device), so it
    would compute over and over what it need not, and take minutes to find out that this does not help.
    """
    if platform != "gpu":
        return None
    options: CompilerOptions = {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE",
        "xla_gpu_enable_dynamic_slice_fusion": False,
        "xla_disable_hlo_passes": "rematerialization",
    }
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


@cache
def source_digest() -> str:
    """A digest of all source code that a program may depend on."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for source in _SOURCES:
        files = [path for path in sorted((root / source).rglob("*")) if path.suffix in (".py", ".json")]
        for path in files or [root / source]:
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _host() -> str:
    """The processor's own features: XLA:CPU compiles for exactly these."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _backend_version(client: Any) -> str:
    """Of what compiles. On a GPU it is a package, which is there too where a program is compiled for a GPU that is not."""
    if client.platform == "cpu":
        return client.platform_version
    plugins = [package for package in importlib.metadata.distributions() if (package.name or "").endswith("-plugin")]
    return ", ".join(sorted(f"{plugin.name} {plugin.version}" for plugin in plugins if plugin.name.startswith("jax-cuda")))


def trim_heap() -> None:
    """Give the system what the C library's heap keeps of freed memory, where it can (glibc).

    To load or compile a program takes 100 to 200 MB for a moment, mostly in small pieces, which stay with the process otherwise.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Let no other process do this meanwhile, where the file system can tell; a process that dies keeps nobody waiting."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:
        yield  # nothing can be kept there either
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("%s cannot be locked: %s", path, error)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


class ProgramCache:
    """
    Args:
        directory: where to keep programs; None keeps none.
        devices: what they are compiled for, in the order of the mesh.
        parts: whatever else all programs of an engine depend on, by what it is called; its `repr` must tell it all.
        options: XLA's options for them.
        shipped: the directory was made by `python -m jaxllm.build`; nothing is ever compiled.

    Attributes:
        facts: all that the programs depend on, `parts` included; empty if none are kept.
    """

    def __init__(
        self,
        directory: str | None,
        devices: list[jax.Device],
        parts: Mapping[str, Any],
        options: CompilerOptions | None = None,
        shipped: bool = False,
    ) -> None:
        self._shipped = shipped
        self.facts: dict[str, str] = {}
        self._directory = None if directory is None else Path(directory)
        self._devices = devices
        self._options = options
        if directory is None:
            return
        client = devices[0].client
        facts = {
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "Python": platform.python_version(),
            "backend": _backend_version(client),
            "devices": [(device.platform, device.device_kind, device.id) for device in devices],
            "processor features": _host() if client.platform == "cpu" else "",
            "XLA flags": (os.environ.get("XLA_FLAGS"), jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64),
            "compiler options": options,
            "version of jaxllm": source_digest(),
            **parts,
        }
        self.facts = {name: repr(value) for name, value in facts.items()}
        self._common = repr(self.facts)

    def get(self, name: str, key: Any, lower: Callable[[str], jax.stages.Lowered]) -> jax.stages.Compiled:
        """The program, from disk or compiled and then kept.

        Args:
            name: for people; becomes part of the file's name.
            key: what this program depends on beyond `parts`.
            lower: traces and lowers it, as a function of the name that it is given. jax's own cache knows a program by that name
                too. It is a new one each time, so that cache never answers in place of the compiler: XLA:CPU cannot serialize a
                program that was loaded.

        Raises:
            ValueError: if it is not among those that were shipped.
        """
        try:
            return self._get(name, key, lower)
        finally:
            trim_heap()

    def _get(self, name: str, key: Any, lower: Callable[[str], jax.stages.Lowered]) -> jax.stages.Compiled:
        if self._directory is None:
            return lower("step").compile(compiler_options=self._options)
        digest = hashlib.sha256(f"{self._common}{key!r}".encode()).hexdigest()[:32]
        path = self._directory / f"{name.replace(' ', '-')}-{digest}.program"
        program = self._load(path)
        if program is None and self._shipped:
            raise ValueError(f"compiled_dir {str(self._directory)!r} holds no usable program for {name}: build it anew")
        if program is None:
            # Of several engines that start at once one compiles, while the others go on to the next program or wait for it.
            with _one_at_a_time(path.with_suffix(".lock")):
                program = self._load(path)
                if program is None:
                    program = lower(f"step_{secrets.token_hex(8)}").compile(compiler_options=self._options)
                    self._save(path, program)
        return program

    def _load(self, path: Path) -> jax.stages.Compiled | None:
        try:
            payload = pickle.loads(zlib.decompress(path.read_bytes()))
            os.utime(path)
            return serialize_executable.deserialize_and_load(*payload, execution_devices=self._devices)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with a cached file, compiling anew is right
            logger.warning("%s cannot be used: %s: %s", path, type(error).__name__, error)
            return None

    def _save(self, path: Path, program: jax.stages.Compiled) -> None:
        try:
            data = zlib.compress(pickle.dumps(serialize_executable.serialize(program)), level=1)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written beside and moved: another process sees all of the file or none.
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False, suffix=".tmp") as file:
                file.write(data)
            os.replace(file.name, path)
            self._prune(path.parent)
        except Exception as error:  # a full disk, or a backend that cannot serialize: the program itself is fine
            logger.warning("%s cannot be kept: %s: %s", path, type(error).__name__, error)

    def _prune(self, directory: Path) -> None:
        """Remove the programs used least recently until MAX_BYTES are left."""
        files = sorted(((file.stat(), file) for file in directory.glob("*.program")), key=lambda entry: -entry[0].st_mtime)
        total = 0
        for stat, file in files:
            total += stat.st_size
            if total > MAX_BYTES:
                file.unlink(missing_ok=True)
