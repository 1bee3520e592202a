"""EngineArgs as command-line flags, for every command that starts an engine."""

import argparse
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from jaxllm.engine.engine_args import EngineArgs, UsageContext, parse_unknown

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class ArgumentParser(argparse.ArgumentParser):
    """Takes --max_model_len for --max-model-len, and suggests the nearest flag for an unknown one."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None):  # type: ignore[override]
        args = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([_with_dashes(arg) for arg in args], namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None):  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        for arg in unknown:
            known = [flag for action in self._all_actions(parsed) for flag in action.option_strings]
            self.error(parse_unknown(arg.partition("=")[0], known))
        return parsed

    def _all_actions(self, parsed: argparse.Namespace) -> list[argparse.Action]:
        actions = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(getattr(parsed, action.dest, None))
                actions += chosen._actions if chosen else []
        return actions


def _with_dashes(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value


def human_int(text: str) -> int:
    """An integer, also as 32k (32000), 32K (32768), 1m, 1M, 2g, 2G.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)", text)
    value = float(match[1]) * _SUFFIXES.get(match[2], 1) if match else 0.5
    if value != int(value):
        raise argparse.ArgumentTypeError(f"invalid integer {text!r}; examples: 4096, 32k (32000), 32K (32768)")
    return int(value)


def int_list(text: str) -> list[int]:
    """Integers between commas.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    return [human_int(part) for part in text.split(",")]


def json_object(text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"invalid JSON {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def attribute_docs(cls: type) -> dict[str, str]:
    """What the class docstring says of each attribute under "Attributes:"."""
    docs: dict[str, str] = {}
    names: list[str] = []
    text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    for line in text.splitlines():
        match = re.match(r"    (\w[\w, ]*): (.*)", line)
        if match:
            names = [name.strip() for name in match[1].split(",")]
            docs.update(dict.fromkeys(names, match[2]))
        elif line.strip():
            docs.update({name: f"{docs[name]} {line.strip()}" for name in names})
    return docs


def _converter(annotation: Any) -> Callable[[str], Any]:
    if isinstance(annotation, types.UnionType):
        annotation = next(arg for arg in typing.get_args(annotation) if arg is not types.NoneType)
    if annotation is int:
        return human_int
    if typing.get_origin(annotation) in (dict, Mapping):
        return json_object
    if annotation == Sequence[int]:
        return int_list
    return annotation


class _Strings(argparse.Action):
    """One or more values, or a JSON list of them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if len(values) == 1 and values[0].startswith("["):
            try:
                values = json.loads(values[0])
            except json.JSONDecodeError as error:
                raise argparse.ArgumentError(self, f"invalid JSON {values[0]!r}: {error}") from error
            if not all(isinstance(value, str) for value in values):
                raise argparse.ArgumentError(self, f"must be a list of strings, got {values!r}")
        setattr(namespace, self.dest, tuple(values))


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def add_fields(group: Any, cls: type, names: Sequence[str] | None = None) -> None:
    """Add a flag for fields of a dataclass, with what its docstring says of them.

    Args:
        group: a parser or a group of one.
        names: the fields; None for all.
    """
    docs = attribute_docs(cls)
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        if names is not None and field.name not in names:
            continue
        text = docs.get(field.name, "").replace("%", "%%")
        default = field.default if field.default_factory is MISSING else field.default_factory()
        options: dict[str, Any] = {"default": default, "help": text}
        if hints[field.name] is bool:
            group.add_argument(flag_of(field.name), action=argparse.BooleanOptionalAction, **options)
            continue
        if default not in (None, (), "", {}):
            options["help"] += f" (default: {' '.join(default) if isinstance(default, tuple) else default})"
        if typing.get_origin(hints[field.name]) is tuple:
            group.add_argument(flag_of(field.name), nargs="+", action=_Strings, metavar="X", **options)
        else:
            group.add_argument(flag_of(field.name), type=_converter(hints[field.name]), metavar="X", **options)


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of EngineArgs."""
    add_fields(parser.add_argument_group("engine"), EngineArgs)


def fields_of[T](namespace: argparse.Namespace, cls: type[T]) -> T:
    """An object of the fields among parsed flags."""
    return cls(**{field.name: getattr(namespace, field.name) for field in fields(cls)})  # type: ignore[arg-type]  # a dataclass


def engine_args_of(namespace: argparse.Namespace) -> EngineArgs:
    """The EngineArgs among parsed flags."""
    return fields_of(namespace, EngineArgs)


def run_node(args: EngineArgs, usage: UsageContext) -> int:
    """What a command does on a machine whose node rank is not 0: run its workers until node 0 ends. Returns the exit code.

    Raises:
        ValueError: for a configuration that is not that of node 0.
    """
    from jaxllm.executor import nodes

    try:
        nodes.run_node(args.create_engine_config(usage))
    except nodes.WorkerGoneError as error:
        print(f"jaxllm: error: {error}", file=sys.stderr)
        return 1
    return 0
