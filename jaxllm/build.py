"""`python -m jaxllm.build`: compile every step of an engine into a folder to ship, for the devices of this machine or for a GPU
that is not here (`--device h200`).

An engine that is started with `--compiled-dir` and the same arguments, on a machine of the same kind, compiles no step.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.cli_args import ArgumentParser, add_engine_args, engine_args_of
from jaxllm.engine.engine_args import EngineArgs, detect_platform
from jaxllm.worker.manifest import write_manifest


def build(args: EngineArgs, out: str, device: str | None = None) -> Path:
    """Compile every step.

    Args:
        out: a folder that is empty or does not exist.
        device: a GPU model by the name that `python -m jaxllm.plan` has for it, of which none need be here; None for the devices
            of this machine.

    Returns:
        The file that says what the programs were built for.

    Raises:
        ValueError: if the folder is not empty, or the arguments do not fit the model or the devices.
    """
    if args.compiled_dir is not None or args.compilation_cache_dir:
        raise ValueError("compiled_dir and compilation_cache_dir name no place to build in: give --out")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out must be an empty folder or a new one, got {out!r}")
    if device is not None:
        return _build_for(args, folder, device)
    from kernels_pallas.paged_attention import INTERPRETED_ON_CPU  # imports jax

    if args.attention_backend in INTERPRETED_ON_CPU and detect_platform() == "cpu":
        raise ValueError(f"attention_backend {args.attention_backend!r} is interpreted on a CPU: such programs cannot be shipped")
    config = replace(_config_for(args, folder, None), background_compilation=False)
    # These import jax.
    from jaxllm.executor.uniproc import UniProcExecutor
    from jaxllm.worker.compile_cache import forget_programs

    forget_programs()
    executor = UniProcExecutor(config)
    try:
        # The whole start, so that what is compiled beside the steps is there too.
        num_blocks = executor.initialize().num_blocks
        facts = executor.worker.built_for()
    finally:
        executor.shutdown()
    return write_manifest(folder, facts, num_blocks)


def _config_for(args: EngineArgs, folder: Path, device: str | None) -> EngineConfig:
    """That of a server, which is what programs are shipped to."""
    config = replace(args.create_engine_config("server", device), compilation_cache_dir=str(folder.absolute()))
    parallel = config.parallel
    if parallel.distributed_executor_backend == "mp" and parallel.num_workers > 1:
        raise ValueError(
            f"programs are built for one process, got distributed_executor_backend 'mp' with {parallel.num_workers} workers"
        )
    return config


def _build_for(args: EngineArgs, folder: Path, device: str) -> Path:
    """Compile every step for a GPU model."""
    from jaxllm.plan.abstract_worker import AbstractWorker
    from kernels_pallas.aot import TARGETS, unavailable_reason

    if device not in TARGETS:
        raise ValueError(f"--device must be one of {', '.join(TARGETS)}, got {device!r}")
    if (reason := unavailable_reason()) is not None:
        raise ValueError(reason)
    target = TARGETS[device]
    config = _config_for(args, folder, target.device_kind)
    if config.parallel.pipeline_parallel_size > 1:
        raise ValueError(f"--device builds no pipelines, got pipeline_parallel_size {config.parallel.pipeline_parallel_size}")
    worker = AbstractWorker(config, target)
    worker.init_device()
    worker.build_model()
    num_blocks = worker.determine_available_memory().num_blocks
    worker.runner.compile_all(config.use_tqdm_on_load)
    return write_manifest(folder, worker.built_for(), num_blocks)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code. A caller's mistake is one line on standard error and the code 2."""
    parser = ArgumentParser(prog="python -m jaxllm.build", description=(__doc__ or "").strip())
    parser.add_argument("--out", required=True, metavar="DIR", help="an empty folder or a new one")
    parser.add_argument("--device", metavar="X", help="h200, h100, a100 or b200; by default the devices of this machine")
    add_engine_args(parser)
    args = parser.parse_args(argv)
    if args.device is not None:
        # Nothing runs on a device, and a CUDA plugin without a GPU is no backend.
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        print(build(engine_args_of(args), args.out, args.device))
    except ValueError as error:
        print(f"python -m jaxllm.build: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
