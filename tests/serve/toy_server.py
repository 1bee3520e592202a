"""Servers for tests: the real HTTP front end and the real engine process, over the toy executor.

Run as a script it is a server of its own: `python toy_server.py [--slow|--broken|--impossible] [flags of jaxllm.serve]`.
"""

import asyncio
import dataclasses
import functools
import sys
import threading
from typing import Any

from saying import BrokenExecutor, ImpossibleExecutor, SayingExecutor, SlowExecutor
from toy_engine import ToyExecutor, make_config, make_tokenizer

from jaxllm.config import EngineConfig
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.engine_args import EngineArgs
from jaxllm.engine.headless import headless_ranks, run_headless
from jaxllm.serve.api_servers import EngineParts
from jaxllm.serve.args import ServeArgs
from jaxllm.serve.context import Context
from jaxllm.serve.server import ApiServer, address_of, bind

MAX_MODEL_LEN = 512
EXECUTORS = {"--slow": SlowExecutor, "--broken": BrokenExecutor, "--impossible": ImpossibleExecutor}


tokenizer = functools.cache(make_tokenizer)


def toy_config(**kwargs: Any) -> Any:
    return make_config(**{"max_model_len": MAX_MODEL_LEN, "num_blocks": 2049, "max_num_batched_tokens": 256, **kwargs})


class ServerThread:
    """A server in a thread of this process, with its engine in a process of its own.

    Args:
        executor_class: of the engine.
        config: fields of `make_config`.
        args: fields of ServeArgs.
    """

    def __init__(
        self, executor_class: type[ToyExecutor] = SayingExecutor, config: dict[str, Any] | None = None, **args: Any
    ) -> None:
        engine_config = toy_config(**(config or {}))
        self.engine = AsyncLLM(engine_config, tokenizer(), executor_class)
        self.args = ServeArgs(**{"host": "127.0.0.1", "port": 0, "served_model_name": ("toy",), **args})
        self.context = Context(self.engine, engine_config, tokenizer(), self.args)
        self.sock = bind(self.args)
        self.url = address_of(self.sock, self.args)
        self.exit_code: int | None = None
        self._ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._ready.wait(30)

    def _run(self) -> None:
        self.exit_code = asyncio.run(self._serve())

    async def _serve(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.server = ApiServer(self.context, self.sock)
        running = asyncio.create_task(self.server.run())
        while not (self.server.is_started or running.done()):
            await asyncio.sleep(0.01)
        self._ready.set()
        return await running

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def stop(self) -> int | None:
        """Stop it like SIGTERM does. Returns the exit code."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.stop)
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.engine.shutdown()
        self.sock.close()
        return self.exit_code


def config_of(args: EngineArgs) -> EngineConfig:
    """What the flags of data parallelism say; the rest is the toy's own."""
    config = toy_config(data_parallel_size=args.data_parallel_size, data_parallel_restart=args.data_parallel_restart)
    names = ("data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **given))


def run_engines(args: EngineArgs, executor: type[ToyExecutor] = SayingExecutor) -> None:
    ranks = headless_ranks(args)
    run_headless(config_of(args), ranks, executor)


def main() -> int:
    """`jaxllm.serve` with the toy engine instead of a model."""
    from jaxllm.serve.cli import main as serve

    argv = sys.argv[1:]
    executor: type[ToyExecutor] = SayingExecutor
    if argv and argv[0] in EXECUTORS:
        argv, executor = argv[1:], EXECUTORS[argv[0]]

    def start(args: Any, phases: Any) -> AsyncLLM:
        with phases.phase("engine"):
            return AsyncLLM(config_of(args), tokenizer(), executor)

    def make_parts(args: Any) -> EngineParts:
        return EngineParts(config_of(args), make_tokenizer, executor)

    argv = ["--host", "127.0.0.1", "--port", "0", "--served-model-name", "toy", *argv]
    return serve(argv, start, make_parts, functools.partial(run_engines, executor=executor))


if __name__ == "__main__":
    sys.exit(main())
