"""The command line: `jaxllm generate`, `jaxllm chat`, `jaxllm convert`."""

import argparse
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.engine.cli_args import ArgumentParser, add_engine_args, engine_args_of, run_node
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

EXIT_INTERRUPTED = 130
DEFAULT_MAX_TOKENS = 16  # of `generate`; a chat may use all that the model's length leaves


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. A caller's mistake is one line on standard error and the code 2."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["serve"]:
        return _serve(argv[1:])
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        return args.run(args)
    except ValueError as error:
        print(f"jaxllm {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="jaxllm", description="LLM inference in JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=ArgumentParser)

    generate = commands.add_parser("generate", help="complete one or more prompts")
    generate.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times; '-' reads it from standard input"
    )
    generate.add_argument("--prompt-file", metavar="FILE", help="a prompt a line")
    generate.add_argument("--chat", action="store_true", help="send each prompt as a chat message, through the model's template")
    generate.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    chat.set_defaults(run=_chat)

    for command in (generate, chat):
        _add_sampling_args(command)
        add_engine_args(command)

    commands.add_parser("serve", help="serve a model over HTTP; see `jaxllm serve --help`")

    convert = commands.add_parser("convert", help="write a model as an Orbax checkpoint folder")
    convert.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a hub id, or an alias")
    convert.add_argument("out", metavar="OUT", help="the folder to make")
    convert.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: as they are)")
    convert.set_defaults(run=_convert)

    for command in (generate, chat, convert):
        command.add_argument("--verbose", "-v", action="store_true", help="log what happens")
    return parser


def _serve(argv: Sequence[str]) -> int:
    try:
        from jaxllm.serve.cli import main as serve
    except ModuleNotFoundError as error:
        print(f"jaxllm serve: error: {error.name} is missing: pip install 'jaxllm[serve]'", file=sys.stderr)
        return 2
    return serve(argv)


def _add_sampling_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "where a flag is left out, the model's own recommendation counts")
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        group.add_argument("--" + name.replace("_", "-"), type=float, metavar="X")
    for name in ("top_k", "max_tokens", "min_tokens"):
        group.add_argument("--" + name.replace("_", "-"), type=int, metavar="N")
    # --seed is the engine's; a request's own seed has a flag of its own.
    group.add_argument("--sampling-seed", type=int, metavar="N", help="make the request's tokens reproducible")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the output at this string; may be given several times"
    )
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction)


_SAMPLING_FIELDS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "max_tokens",
    "min_tokens", "stop", "ignore_eos",
)  # fmt: skip


def _sampling_params(args: argparse.Namespace, recommended: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
    """The flags over what the model recommends; `max_tokens` where neither says anything."""
    given = {name: getattr(args, name) for name in _SAMPLING_FIELDS if getattr(args, name) is not None}
    if args.sampling_seed is not None:
        given["seed"] = args.sampling_seed
    return SamplingParams(**{"max_tokens": max_tokens, **recommended, **given})


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompt or []]
    if args.prompt_file:
        try:
            with open(args.prompt_file, encoding="utf-8") as file:
                prompts += [line.rstrip("\n") for line in file if line.strip()]
        except OSError as error:
            raise ValueError(f"--prompt-file {args.prompt_file}: {error.strerror}") from error
    if not prompts:
        raise ValueError("give a prompt with --prompt or --prompt-file")
    return prompts


def _generate(args: argparse.Namespace) -> int:
    from jaxllm.engine.llm_engine import LLMEngine
    from jaxllm.llm import LLM

    if (engine_args := engine_args_of(args)).node_rank > 0:
        return run_node(engine_args, "llm")
    prompts = _prompts(args)
    _sampling_params(args, {}, DEFAULT_MAX_TOKENS)  # what is wrong with the flags is said before the model is loaded
    with LLM.from_engine(LLMEngine.from_engine_args(engine_args)) as llm:
        params = _sampling_params(args, llm.engine.config.model.generation_defaults, DEFAULT_MAX_TOKENS)
        if args.chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        if args.json:
            record = {
                "prompt": prompt,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
            }
            print(json.dumps(record, ensure_ascii=False))
        elif args.chat:
            print(completion.text)
        else:
            print(prompt + completion.text)
    return 0


def _chat(args: argparse.Namespace) -> int:
    from jaxllm.engine.llm_engine import LLMEngine

    if (engine_args := engine_args_of(args)).node_rank > 0:
        return run_node(engine_args, "llm")
    _sampling_params(args, {}, None)
    engine = LLMEngine.from_engine_args(engine_args)
    try:
        params = _sampling_params(args, engine.config.model.generation_defaults, None)
        params.output_kind = RequestOutputKind.DELTA
        messages = [{"role": "system", "content": args.system}] if args.system else []
        if sys.stdin.isatty():
            print("Type a message. An empty line or Ctrl-D ends the chat, Ctrl-C an answer.", file=sys.stderr)
        for turn, message in enumerate(iter(_read_message, "")):
            messages.append({"role": "user", "content": message})
            messages.append({"role": "assistant", "content": _answer(engine, f"chat-{turn}", messages, params)})
    finally:
        engine.shutdown()
    return 0


def _read_message() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _answer(engine: Any, request_id: str, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer to standard output and return it. Ctrl-C ends it early; what was said so far counts."""
    from jaxllm.tokenizer import apply_chat_template

    prompt = apply_chat_template(engine.get_tokenizer(), messages, add_generation_prompt=True, tokenize=True)
    start, num_tokens, text = time.perf_counter(), 0, ""
    try:
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                num_tokens += len(output.outputs[0].token_ids)
                text += output.outputs[0].text
                print(output.outputs[0].text, end="", flush=True)
    except KeyboardInterrupt:
        engine.abort_request([request_id])
    print()
    print(f"[{num_tokens} tokens, {num_tokens / (time.perf_counter() - start):.1f} tokens/s]", file=sys.stderr)
    return text


def _convert(args: argparse.Namespace) -> int:
    from jaxllm.weights.orbax import convert

    print(convert(args.model, args.out, args.dtype))
    return 0
