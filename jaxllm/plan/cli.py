"""The command line of `python -m jaxllm.plan`."""

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jaxllm.engine.cli_args import ArgumentParser, add_engine_args, engine_args_of, human_int, int_list
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.plan.known_models import KNOWN_MODELS

PROG = "python -m jaxllm.plan"
DESCRIPTION = """
What a model needs on a GPU that need not be there. Compiles the engine's own steps for it, without weights, and reads memory,
communication and kernels from the result; the times are what the device's bandwidth and rate allow at most.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=PROG, description=DESCRIPTION)
    group = parser.add_argument_group("plan")
    group.add_argument("--device", default="h200", metavar="X", help="h200, h100, a100 or b200 (default: h200)")
    # The name that everybody types, for --tensor-parallel-size.
    group.add_argument(
        "--tp", type=human_int, dest="tensor_parallel_size", default=argparse.SUPPRESS, metavar="X", help="devices"
    )
    group.add_argument("--context", type=human_int, default=1024, metavar="X", help="tokens of a request in a decode step")
    group.add_argument("--rows", type=int_list, default=[1, 8, 32, 64, 128, 256], metavar="X", help="decode batch sizes to time")
    group.add_argument("--prompts", type=int_list, default=[128, 1024, 8192], metavar="X", help="prompt lengths to time")
    group.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=True, help="read the kernels' registers")
    group.add_argument("--json", action="store_true", help="print JSON")
    add_engine_args(parser)
    parser.epilog = f"--model is a folder, a .gguf file, a hub id, or one of {', '.join(KNOWN_MODELS)}."
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan and return the exit code. A caller's mistake is one line on standard error and the code 2."""
    # Nothing runs on a device, and a CUDA plugin without a GPU is no backend.
    os.environ["JAX_PLATFORMS"] = "cpu"
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    args = make_parser().parse_args(argv)
    try:
        from jaxllm.plan.report import make_plan, plan_text
        from kernels_pallas.aot import TARGETS, unavailable_reason

        if args.device not in TARGETS:
            raise ValueError(f"--device must be one of {', '.join(TARGETS)}, got {args.device!r}")
        for name in ("rows", "prompts"):
            if min(getattr(args, name)) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
        if args.context < 1:
            raise ValueError(f"--context must be at least 1, got {args.context}")
        reason = unavailable_reason()
        if reason is not None:
            raise ValueError(reason)
        with _folder_of(args.model) as folder:
            target = TARGETS[args.device]
            engine_args = replace(engine_args_of(args), model=folder, load_format="dummy", skip_tokenizer_init=True)
            config = _with_name(engine_args, args.model, target.device_kind)
            plan = make_plan(config, target, rows=args.rows, context=args.context, prompts=args.prompts, kernels=args.kernels)
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(plan, indent=2) if args.json else plan_text(plan))
    return 0


@contextmanager
def _folder_of(model: str) -> Iterator[str]:
    """Where the model's config.json lies; one is written for a known name that is no folder."""
    if model.lower() not in KNOWN_MODELS or Path(model).exists():
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="jaxllm-plan-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(KNOWN_MODELS[model.lower()]))
        yield folder


def _with_name(engine_args: EngineArgs, model: str, device: str):
    config = engine_args.create_engine_config("server", device)
    return replace(config, model=replace(config.model, model=model))
