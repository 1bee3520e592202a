"""The command line of `python -m jaxllm.bench`."""

import argparse
import asyncio
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence

from jaxllm.engine.cli_args import ArgumentParser

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
COMMANDS = {
    "serve": "load an OpenAI server (this engine's or another's) and measure how it answers",
    "sweep": "do so over a grid of rates, concurrencies and batch limits; find the best point and the knee",
    "throughput": "many requests to the engine itself, without a server",
    "latency": "one batch to the engine itself, again and again",
    "host": "what the host does in a step, by the number of running requests, with a device that costs nothing",
    "simulate": "thousands of engines on a virtual clock: the real scheduler and load balancer, without a device",
    "measure-steps": "step times of the engine on this machine, for simulate",
    "startup": "the phases of an engine's start, with and without compiled programs",
    "trace": "what the folder of --profile says: the stages of the steps and the device's idle gaps",
}
_HTTP_COMMANDS = ("serve", "sweep")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. A caller's mistake is one line on standard error and the code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in COMMANDS:
        return _overview(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    name, *flags = argv
    prog = f"python -m jaxllm.bench {name}"
    parser = ArgumentParser(prog=prog, description=COMMANDS[name][0].upper() + COMMANDS[name][1:] + ".")
    try:
        run = _add_command(name, parser, flags)
        return run(parser.parse_args(flags))
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except asyncio.CancelledError:
        return EXIT_TERMINATED


def _overview(argv: Sequence[str]) -> int:
    """Help, or what is wrong with the command's name."""
    parser = ArgumentParser(prog="python -m jaxllm.bench", description="Benchmarks of jaxllm and of any OpenAI server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=ArgumentParser)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    parser.parse_args(argv)
    raise AssertionError("argparse accepts no other command")


def _add_command(name: str, parser: ArgumentParser, flags: Sequence[str]) -> Callable[[argparse.Namespace], int]:
    """Add the flags of a command; gives what runs it. Nothing else is imported: the load client must not start jax."""
    if name in _HTTP_COMMANDS:
        if importlib.util.find_spec("aiohttp") is None:
            raise ValueError("aiohttp is not installed: pip install 'jaxllm[bench]'")
        from jaxllm.bench import serve, sweep

        (serve.add_serve_args if name == "serve" else sweep.add_sweep_args)(parser)
        return serve.run if name == "serve" else sweep.run
    if name == "startup":
        from jaxllm.bench import startup

        startup.add_startup_args(parser)
        return lambda args: startup.run(args, flags)
    if name == "host":
        from jaxllm.bench import host

        host.add_host_args(parser)
        return host.run
    if name == "trace":
        from jaxllm.bench import trace

        trace.add_trace_args(parser)
        return trace.run
    if name == "simulate":
        from jaxllm.bench import simulate

        simulate.add_simulate_args(parser)
        return simulate.run
    if name == "measure-steps":
        from jaxllm.bench import measure_steps

        measure_steps.add_measure_steps_args(parser)
        return measure_steps.run
    from jaxllm.bench import offline

    (offline.add_throughput_args if name == "throughput" else offline.add_latency_args)(parser)
    return offline.run_throughput if name == "throughput" else offline.run_latency
