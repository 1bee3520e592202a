"""The command line of the server."""

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvloop

from jaxllm.engine.cli_args import ArgumentParser, add_engine_args, add_fields, engine_args_of, fields_of, run_node
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.engine.errors import EngineStartError, FrontEndLostError
from jaxllm.serve.args import ServeArgs
from jaxllm.serve.vllm_flags import add_vllm_flags, long_flags

if TYPE_CHECKING:
    from jaxllm.engine.async_llm import AsyncLLM
    from jaxllm.serve.api_servers import EngineParts

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_USAGE = 2
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s{}: %(message)s"

GROUPS: dict[str, tuple[str, ...]] = {
    "HTTP": (
        "host", "port", "uds", "root_path", "api_key", "allowed_origins", "allowed_methods", "allowed_headers",
        "allow_credentials", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "max_body_size", "sse_keep_alive_interval",
        "shutdown_timeout", "disable_fastapi_docs", "dev_mode", "api_server_count", "headless",
    ),
    "API": (
        "served_model_name", "chat_template", "chat_template_content_format", "default_chat_template_kwargs",
        "trust_request_chat_template", "response_role", "enable_auto_tool_choice", "tool_call_parser",
        "exclude_tools_when_tool_choice_none", "reasoning_parser", "return_tokens_as_token_ids", "enable_prompt_tokens_details",
        "enable_force_include_usage", "enable_per_request_metrics", "enable_request_id_headers",
    ),
    "logs and metrics": (
        "vllm_metric_names", "enable_log_requests", "enable_log_outputs", "max_log_len", "disable_uvicorn_access_log",
        "uvicorn_log_level",
    ),
}  # fmt: skip

StartEngine = Callable[[EngineArgs], "AsyncLLM"]


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m jaxllm.serve",
        usage="%(prog)s [MODEL] [flags]",
        description="Serve a model over OpenAI's HTTP API.",
        epilog="Dashes and underscores are the same. Numbers may be written 32k (32000) or 32K (32768). Fields of JSON flags may "
        "be given one by one: --hf-overrides.rope_theta 10000. Flags of `vllm serve` that mean nothing here are accepted.",
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML with flags as keys; what the command line says counts more")
    for title, names in GROUPS.items():
        add_fields(parser.add_argument_group(title), ServeArgs, names)
    add_engine_args(parser)
    add_vllm_flags(parser)
    return parser


def parse(argv: Sequence[str]) -> tuple[ServeArgs, EngineArgs, list[str]]:
    """(the server's arguments, the engine's, notes on flags without effect). Exits with EXIT_USAGE for a mistake."""
    parser = make_parser()
    args = long_flags(argv)
    path = _config_path(args)
    if path is not None:
        try:
            args = flags_of_file(path) + args
        except ValueError as error:
            parser.error(str(error))
    namespace = parser.parse_args(_join_dotted(args, parser))
    if namespace.model_tag is not None:
        namespace.model = namespace.model_tag
    if not namespace.api_key and os.environ.get("JAXLLM_API_KEY"):
        namespace.api_key = (os.environ["JAXLLM_API_KEY"],)
    try:
        return fields_of(namespace, ServeArgs), engine_args_of(namespace), getattr(namespace, "notes", [])
    except ValueError as error:
        parser.error(str(error))


def _config_path(args: Sequence[str]) -> str | None:
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument("--config")
    return config.parse_known_args(args)[0].config


def flags_of_file(path: str) -> list[str]:
    """The flags that a YAML file holds.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"--config {path}: must hold flags as keys, got {type(values).__name__}")
    flags: list[str] = []
    for key, value in values.items():
        flag = "--" + str(key).replace("_", "-")
        if value is None or flag == "--config":
            raise ValueError(f"--config {path}: {key} must have a value, and files do not name other files")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, Mapping):
            flags += [flag, json.dumps(value)]
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    return flags


def _join_dotted(args: Sequence[str], parser: ArgumentParser) -> list[str]:
    """`--flag.a.b value` as `--flag '{"a": {"b": value}}'`. Values are JSON, or strings where they are not."""
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        name, dot, path = flag.partition(".")
        if not (flag.startswith("--") and dot):
            result.append(arg)
            continue
        if not equals:
            value = next(rest, "")
            if not value:
                parser.error(f"argument {flag}: expected one argument")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        *folders, key = path.split(".")
        inner = objects.setdefault(name.replace("_", "-"), {})
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[key] = parsed
    for name, fields in objects.items():
        result += [name, json.dumps(fields)]
    return result


class Phases:
    """Prints a line a phase of the start, with the seconds that it took."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.say(f"{name:<16}{time.perf_counter() - start:6.1f} s")

    def say(self, line: str) -> None:
        print(line, flush=True)


def start_engine(args: EngineArgs, phases: Phases) -> "AsyncLLM":
    """An engine in a process of its own, ready to serve.

    Raises:
        ValueError: naming the argument and its value.
        EngineStartError: if the process ends before it is ready.
    """
    from jaxllm.engine.async_llm import AsyncLLM

    with phases.phase("configuration"):
        config = args.create_engine_config("server")
    with phases.phase("tokenizer"):
        tokenizer = args.load_tokenizer()
    with phases.phase("engine"):
        return AsyncLLM(config, tokenizer)


def engine_parts(args: EngineArgs) -> "EngineParts":
    """
    Raises:
        ValueError: naming the argument and its value.
    """
    from jaxllm.serve.api_servers import EngineParts

    return EngineParts(args.create_engine_config("server"), args.load_tokenizer)


def run_engines_only(args: EngineArgs) -> None:
    """What --headless does.

    Raises:
        ValueError: naming the argument and its value, or what the server has against this machine.
        FrontEndLostError: if the server is lost.
    """
    from jaxllm.engine.headless import headless_config, headless_ranks, run_headless

    ranks = headless_ranks(args)
    run_headless(headless_config(args), ranks)


def main(
    argv: Sequence[str] | None = None,
    start: "Callable[[EngineArgs, Phases], AsyncLLM]" = start_engine,
    make_parts: "Callable[[EngineArgs], EngineParts]" = engine_parts,
    run_engines: Callable[[EngineArgs], None] = run_engines_only,
) -> int:
    """Serve until told to stop.

    Args:
        start: makes the engine.
        make_parts: what several API servers make their engines of.
        run_engines: runs engines for the server of another machine.

    Returns:
        The exit code: 0 if it was told to stop, EXIT_USAGE for a mistake of the caller, EXIT_FAILED if the engine did not start
        or died, 128 plus the signal's number if it was told to stop at once.
    """
    serve_args, engine_args, notes = parse(sys.argv[1:] if argv is None else argv)
    set_up_logging(serve_args)
    for note in notes:
        logger.warning(note)
    phases = Phases()
    sock = engine = launcher = None
    try:
        if engine_args.node_rank > 0:
            return run_node(engine_args, "server")
        if serve_args.headless:
            with _interrupted_by_sigterm():
                run_engines(engine_args)
            return 0
        from jaxllm.serve.server import bind

        sock = bind(serve_args)
        if serve_args.api_server_count > 1:
            from jaxllm.serve.api_servers import Launcher

            with _interrupted_by_sigterm():
                launcher = Launcher(serve_args, make_parts(engine_args), sock)
                with phases.phase("engines"):
                    launcher.wait_until_ready()
            _say_ready(serve_args.served_model_name or (engine_args.model,), sock, serve_args, phases)
            return launcher.run()
        with _interrupted_by_sigterm():
            engine = start(engine_args, phases)
            with phases.phase("front end"):
                from jaxllm.serve.context import Context

                context = Context(engine, engine.config, engine.tokenizer, serve_args)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(context, sock, phases))
    except ValueError as error:
        print(f"jaxllm.serve: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (EngineStartError, FrontEndLostError) as error:
        print(f"jaxllm.serve: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if engine is not None:
            engine.shutdown()
        if launcher is not None:
            launcher.close()
        if sock is not None:
            sock.close()
            if serve_args.uds is not None and os.path.exists(serve_args.uds):
                os.unlink(serve_args.uds)


def set_up_logging(args: ServeArgs, which: str = "") -> None:
    """
    Args:
        which: of several processes, for every line.
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT.format(which))
    level = getattr(logging, args.uvicorn_log_level.upper())
    logging.getLogger("uvicorn.access").setLevel(level)
    # What it says of its own start and end is said better here.
    logging.getLogger("uvicorn.error").setLevel(max(level, logging.WARNING) if level != logging.DEBUG else level)
    for name in ("httpx", "httpcore", "filelock", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM during the start does what Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say_ready(model_names: Sequence[str], sock: socket.socket, args: ServeArgs, phases: Phases) -> None:
    from jaxllm.serve.server import address_of

    phases.say(f"{'ready after':<16}{time.perf_counter() - phases.start:6.1f} s")
    phases.say(f"serving {', '.join(model_names)} on {address_of(sock, args)}")


async def _serve(context: Any, sock: socket.socket, phases: Phases) -> int:
    from jaxllm.serve.server import ApiServer

    server = ApiServer(context, sock)
    loop = asyncio.get_running_loop()
    last_signal = 0

    def on_signal(number: int) -> None:
        nonlocal last_signal
        last_signal = number
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    running = asyncio.create_task(server.run())
    while not (server.is_started or running.done()):
        await asyncio.sleep(0.01)
    if server.is_started:
        _say_ready(context.model_names, sock, context.args, phases)
    code = await running
    return 128 + last_signal if server.num_stops > 1 else code
