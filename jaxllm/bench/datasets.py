"""What a benchmark asks: prompts with the number of tokens to generate for each."""

import argparse
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bench.prompts import Prompts, TextPrompts
from jaxllm.engine.cli_args import human_int

logger = logging.getLogger(__name__)

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "timed_trace")
# What vLLM keeps of ShareGPT: shorter ones say little, longer ones would need a long context.
SHAREGPT_MIN_LEN, SHAREGPT_MAX_PROMPT_LEN, SHAREGPT_MAX_TOTAL_LEN = 4, 1024, 2048
# A custom line without "output_tokens" under --custom-output-len -1, and the default of that flag.
CUSTOM_OUTPUT_LEN = 256


@dataclass(frozen=True)
class SampleRequest:
    """
    Attributes:
        prompt: text or token ids.
        prompt_len: tokens, with the special ones that a server puts before a text.
        output_len: tokens to generate.
        timestamp: seconds after the start at which a trace has it.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    timestamp: float | None = None


def add_dataset_args(parser: argparse.ArgumentParser) -> None:
    """The flags that `load_requests` reads, but for --seed."""
    group = parser.add_argument_group("data set")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="(default: random)")
    group.add_argument("--dataset-path", metavar="FILE", help="of sharegpt (JSON), custom and timed_trace (JSON lines)")
    group.add_argument("--num-prompts", type=human_int, default=1000, metavar="N", help="(default: 1000)")
    group.add_argument("--input-len", type=human_int, metavar="N", help="the same as --random-input-len")
    group.add_argument("--output-len", type=human_int, metavar="N", help="the output length of whatever data set")
    group.add_argument("--no-oversample", action="store_true", help="do not ask twice where a file has too few requests")
    group.add_argument("--disable-shuffle", action="store_true", help="take the first requests of a file")
    group.add_argument("--random-input-len", type=human_int, default=1024, metavar="N", help="tokens (default: 1024)")
    group.add_argument("--random-output-len", type=human_int, default=128, metavar="N", help="tokens (default: 128)")
    group.add_argument(
        "--random-range-ratio",
        type=range_ratio,
        default=(0.0, 0.0),
        metavar="R",
        help='lengths are uniform between (1 - R) and (1 + R) times the length; or {"input": R, "output": R} (default: 0)',
    )
    group.add_argument(
        "--random-prefix-len",
        type=human_int,
        default=0,
        metavar="N",
        help="tokens that all prompts begin with, besides (default: 0)",
    )
    for name, default in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10), ("output-len", 128)):
        group.add_argument(
            f"--prefix-repetition-{name}", type=human_int, default=default, metavar="N", help=f"(default: {default})"
        )
    group.add_argument(
        "--sharegpt-output-len", type=human_int, metavar="N", help="instead of the length of each answer in the file"
    )
    group.add_argument(
        "--custom-output-len",
        type=human_int,
        default=CUSTOM_OUTPUT_LEN,
        metavar="N",
        help=f'-1 for each line\'s own "output_tokens" (default: {CUSTOM_OUTPUT_LEN})',
    )
    group.add_argument("--custom-skip-chat-template", action="store_true", help="send the prompts of a custom file as they are")
    group.add_argument(
        "--timed-trace-chunk-hash-size", type=human_int, default=16, metavar="N", help="tokens a hash id stands for (default: 16)"
    )
    group.add_argument(
        "--timed-trace-sec-multiplier", type=float, default=1.0, metavar="X", help="0.001 for milliseconds (default: 1)"
    )
    for field in ("timestamp", "input-length", "output-length", "hash-ids"):
        name = field.replace("-", "_")
        group.add_argument(f"--timed-trace-label-{field}", default=name, metavar="NAME", help=f"(default: {name})")


def range_ratio(text: str) -> tuple[float, float]:
    """ "0.5" → (0.5, 0.5), '{"input": 0.5, "output": 0}' → (0.5, 0.0).

    Raises:
        argparse.ArgumentTypeError: for anything else, or outside [0, 1).
    """
    try:
        value = json.loads(text)
        ratios = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
        checked = tuple(float(ratio) for ratio in ratios)
    except (ValueError, TypeError, KeyError) as error:
        raise argparse.ArgumentTypeError(f'must be a number or {{"input": R, "output": R}}, got {text!r}') from error
    if any(not 0 <= ratio < 1 for ratio in checked):
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {text!r}")
    return checked[0], checked[1]


def load_requests(
    args: argparse.Namespace,
    prompts: Prompts | None,
    *,
    seed: int,
    as_text: bool,
    apply_chat_template: Callable[[str], str] | None = None,
) -> list[SampleRequest]:
    """The requests that the flags of `add_dataset_args` describe; the same for the same seed.

    Args:
        prompts: TextPrompts but for `random`, `prefix_repetition` and `timed_trace` as token ids; None for `custom` only, whose
            prompts have then a length of 0.
        as_text: whether prompts are text; those of `timed_trace` are token ids always.
        apply_chat_template: what a custom prompt goes through.

    Raises:
        ValueError: naming the flag and its value, or the file, the line and what is wrong with it.
    """
    name, count = args.dataset_name, args.num_prompts
    if count < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {count}")
    if name in ("random", "prefix_repetition") and args.dataset_path is not None:
        raise ValueError(f"--dataset-name {name} takes no --dataset-path, got {args.dataset_path!r}")
    for flag, value in (("--input-len", args.input_len), ("--output-len", args.output_len)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if name not in ("random", "prefix_repetition") and args.dataset_path is None:
        raise ValueError(f"--dataset-name {name} needs --dataset-path")
    rng = np.random.default_rng(seed)
    if name == "custom":
        output_len = args.output_len or args.custom_output_len
        return _choose(list(custom(args.dataset_path, _counter(prompts), output_len, apply_chat_template)), count, rng, args)
    if prompts is None:
        raise ValueError(f"--dataset-name {name} needs a tokenizer, but there is none (--skip-tokenizer-init)")
    if name == "timed_trace":
        return timed_trace(args, prompts, seed)
    if name == "random":
        lengths = args.input_len or args.random_input_len, args.output_len or args.random_output_len
        made = random_tokens(prompts, rng, count, *lengths, args.random_range_ratio, args.random_prefix_len, as_text)
        return [_finish(request, prompts, rng, as_text) for request in made]
    if name == "prefix_repetition":
        made = prefix_repetition_tokens(
            prompts,
            rng,
            count,
            prefix_len=args.prefix_repetition_prefix_len,
            suffix_len=args.prefix_repetition_suffix_len,
            num_prefixes=args.prefix_repetition_num_prefixes,
            output_len=args.output_len or args.prefix_repetition_output_len,
        )
        return [_finish(request, prompts, rng, as_text) for request in made]
    if not isinstance(prompts, TextPrompts):
        raise ValueError(f"--dataset-name {name} needs a tokenizer, but there is none (--skip-tokenizer-init)")
    return _choose(list(sharegpt(args.dataset_path, prompts, args.output_len or args.sharegpt_output_len)), count, rng, args)


def _counter(prompts: Prompts | None) -> Callable[[str, bool], int]:
    """Tokens of a text, with the special ones of a prompt or without."""
    if not isinstance(prompts, TextPrompts):
        return lambda text, special: 0
    return lambda text, special: len(prompts.encode(text)) + special * prompts.num_special_tokens


def random_tokens(
    prompts: Prompts,
    rng: np.random.Generator,
    count: int,
    input_len: int,
    output_len: int,
    ratios: tuple[float, float] = (0.0, 0.0),
    prefix_len: int = 0,
    as_text: bool = True,
) -> list[SampleRequest]:
    """Random prompts of token ids.

    Lengths are uniform over the integers from floor(len · (1 - ratio)) to ceil(len · (1 + ratio)), at least 1. A text is shorter
    by the special tokens that its server adds.
    """
    if input_len < 1 or output_len < 1 or prefix_len < 0:
        raise ValueError(
            "--random-input-len and --random-output-len must be at least 1 and --random-prefix-len at least 0, "
            f"got {input_len}, {output_len} and {prefix_len}"
        )
    special = prompts.num_special_tokens if as_text else 0
    if prefix_len + input_len <= special:
        raise ValueError(f"--random-input-len must be above the {special} special tokens of every prompt, got {input_len}")
    prefix = prompts.token_ids(rng, prefix_len)
    input_lens = _uniform_lens(rng, count, max(0, input_len - special), ratios[0], least=0 if prefix_len else 1)
    output_lens = _uniform_lens(rng, count, output_len, ratios[1], least=1)
    return [
        SampleRequest([*prefix, *prompts.token_ids(rng, n)], prefix_len + n, m)
        for n, m in zip(input_lens, output_lens, strict=True)
    ]


def _uniform_lens(rng: np.random.Generator, count: int, length: int, ratio: float, least: int) -> list[int]:
    low, high = max(least, math.floor(length * (1 - ratio))), max(least, math.ceil(length * (1 + ratio)))
    return rng.integers(low, high, endpoint=True, size=count).tolist()


def prefix_repetition_tokens(
    prompts: Prompts,
    rng: np.random.Generator,
    count: int,
    *,
    prefix_len: int = 256,
    suffix_len: int = 256,
    num_prefixes: int = 10,
    output_len: int = 128,
) -> list[SampleRequest]:
    """Prompts that begin with one of a few prefixes, each as often as the others, and end in suffixes of their own; shuffled."""
    if prefix_len < 0 or suffix_len < 0 or prefix_len + suffix_len < 1 or output_len < 1:
        raise ValueError(
            "--prefix-repetition-prefix-len and -suffix-len must not be negative nor both 0, -output-len at least 1, "
            f"got {prefix_len}, {suffix_len} and {output_len}"
        )
    if not 1 <= num_prefixes <= count:
        raise ValueError(f"--prefix-repetition-num-prefixes must be in [1, --num-prompts = {count}], got {num_prefixes}")
    prefixes = [prompts.token_ids(rng, prefix_len) for _ in range(num_prefixes)]
    requests = [
        SampleRequest([*prefixes[i % num_prefixes], *prompts.token_ids(rng, suffix_len)], prefix_len + suffix_len, output_len)
        for i in range(count)
    ]
    return [requests[i] for i in rng.permutation(count)]


def _finish(request: SampleRequest, prompts: Prompts, rng: np.random.Generator, as_text: bool) -> SampleRequest:
    """A made-up request as text, if that is wanted."""
    if not as_text:
        return request
    assert isinstance(prompts, TextPrompts)
    assert isinstance(request.prompt, list)
    text, length = prompts.text(rng, request.prompt)
    return replace(request, prompt=text, prompt_len=length + prompts.num_special_tokens)


def sharegpt(path: str, prompts: TextPrompts, output_len: int | None) -> Iterator[SampleRequest]:
    """The first question of each conversation of a ShareGPT file, with the length of its answer.

    The file is a JSON list of {"conversations": [{"value": TEXT}, …]}. As in vLLM, what is shorter than 4 tokens, asks in more
    than 1024 or has more than 2048 in all is left out; answers are not looked at where `output_len` is given.
    """
    try:
        entries = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"--dataset-path {path}: no JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"--dataset-path {path}: must be a JSON list of conversations")
    for number, entry in enumerate(entries):
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise ValueError(f'--dataset-path {path}: entry {number} has no list of "conversations"')
        if len(turns) < 2:
            continue
        try:
            question, answer = str(turns[0]["value"]), str(turns[1]["value"])
        except (TypeError, KeyError) as error:
            raise ValueError(f'--dataset-path {path}: a turn of entry {number} has no "value"') from error
        prompt_len = len(prompts.encode(question)) + prompts.num_special_tokens
        length = len(prompts.encode(answer)) if output_len is None else output_len
        long_enough = prompt_len >= SHAREGPT_MIN_LEN and (output_len is not None or length >= SHAREGPT_MIN_LEN)
        if long_enough and prompt_len <= SHAREGPT_MAX_PROMPT_LEN and prompt_len + length <= SHAREGPT_MAX_TOTAL_LEN:
            yield SampleRequest(question, prompt_len, length)


def custom(
    path: str, count_tokens: Callable[[str, bool], int], output_len: int, apply_chat_template: Callable[[str], str] | None
) -> Iterator[SampleRequest]:
    """Lines of {"prompt": TEXT}, and "output_tokens": N where `output_len` is -1.

    Args:
        count_tokens: of a text, with special tokens or without.
    """
    if output_len < 1 and output_len != -1:
        raise ValueError(f"--custom-output-len must be at least 1, or -1, got {output_len}")
    for where, line in _json_lines(path):
        prompt = line.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f'{where}: "prompt" must be a text, got {prompt!r}')
        length = line.get("output_tokens", CUSTOM_OUTPUT_LEN) if output_len == -1 else output_len
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(f'{where}: "output_tokens" must be an integer of at least 1, got {length!r}')
        if apply_chat_template is not None:
            text = apply_chat_template(prompt)
            yield SampleRequest(text, count_tokens(text, False), length)
        else:
            yield SampleRequest(prompt, count_tokens(prompt, True), length)


def timed_trace(args: argparse.Namespace, prompts: Prompts, seed: int) -> list[SampleRequest]:
    """The first lines of a trace such as Mooncake's or Bailian's:
    {"timestamp": 12.4, "input_length": 42, "output_length": 8, "hash_ids": [981, 4412, 7]}.

    Each hash id stands for `--timed-trace-chunk-hash-size` tokens, the same wherever it occurs. A prompt is the chunks of its
    ids, cut to `input_length`, or filled up with tokens of its own.
    """
    size, scale = args.timed_trace_chunk_hash_size, args.timed_trace_sec_multiplier
    if size < 1 or not 0 < scale < math.inf:
        raise ValueError(
            f"--timed-trace-chunk-hash-size must be at least 1 and --timed-trace-sec-multiplier above 0, got {size} and {scale}"
        )
    chunks: dict[Any, list[int]] = {}
    requests: list[SampleRequest] = []
    for number, (where, line) in enumerate(_json_lines(args.dataset_path)):
        if number == args.num_prompts:
            break
        timestamp = _number(line, args.timed_trace_label_timestamp, where, 0)
        input_len = int(_number(line, args.timed_trace_label_input_length, where, 1))
        output_len = int(_number(line, args.timed_trace_label_output_length, where, 1))
        ids = line.get(args.timed_trace_label_hash_ids, [])
        if not isinstance(ids, list) or any(not isinstance(one, int | str) for one in ids):
            raise ValueError(f'{where}: "{args.timed_trace_label_hash_ids}" must be a list of ids, got {ids!r}')
        prompt: list[int] = []
        for one in ids[: math.ceil(input_len / size)]:
            if one not in chunks:
                chunks[one] = prompts.token_ids(np.random.default_rng([seed, *str(one).encode()]), size)
            prompt += chunks[one]
        own = prompts.token_ids(np.random.default_rng([seed, number, 0xFFFF]), max(0, input_len - len(prompt)))
        requests.append(SampleRequest([*prompt, *own][:input_len], input_len, args.output_len or output_len, timestamp * scale))
    if not requests:
        raise ValueError(f"--dataset-path {args.dataset_path}: the trace is empty")
    first = min(request.timestamp for request in requests if request.timestamp is not None)
    shifted = [replace(request, timestamp=request.timestamp - first) for request in requests]  # type: ignore[operator]
    return sorted(shifted, key=lambda request: request.timestamp)  # type: ignore[arg-type,return-value]


def _number(line: dict[str, Any], name: str, where: str, least: float) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise ValueError(f'{where}: "{name}" must be a number of at least {least}, got {value!r}')
    return value


def _json_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line for messages, object) of each line that is not blank."""
    for number, text in enumerate(_read(path).splitlines(), 1):
        if not text.strip():
            continue
        where = f"--dataset-path {path}, line {number}"
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: no JSON: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"{where}: must be a JSON object, got {text!r}")
        yield where, line


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset-path {path}: {getattr(error, 'strerror', None) or error}") from error


def _choose(found: list[SampleRequest], count: int, rng: np.random.Generator, args: argparse.Namespace) -> list[SampleRequest]:
    """`count` of them; some several times if there are too few."""
    if not found:
        raise ValueError(f"--dataset-path {args.dataset_path}: no usable request in it")
    order = range(len(found)) if args.disable_shuffle else rng.permutation(len(found)).tolist()
    chosen = [found[i] for i in order][:count]
    if len(chosen) < count and not args.no_oversample:
        logger.warning("%s has %d usable requests; some of the %d are asked again", args.dataset_path, len(found), count)
        again = rng.integers(len(found), size=count - len(chosen)).tolist()
        chosen += [found[i] for i in again]
    return chosen
