"""Tokenizers of transformers, from a model of any kind, and chat templates. transformers is imported when first needed."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from jaxllm.weights.source import ModelSource, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(
    source: ModelSource | str, *, revision: str | None = None, download_dir: str | None = None
) -> "PreTrainedTokenizerFast":
    """The tokenizer of a model: of a folder its files, of a GGUF file what its metadata describes.

    Args:
        source: a model that was resolved, or a name as `resolve_model` takes it, or a folder that holds only a tokenizer.
        revision, download_dir: as in `resolve_model`, for a name.

    Raises:
        ValueError: naming the model, if it has no tokenizer or one of a kind that is not supported.
    """
    if isinstance(source, ModelSource):
        if revision is not None:
            raise ValueError(f"revision {revision!r} is for a name; {source.model!r} was resolved already")
        return _from_gguf(source.path) if source.kind == "gguf" else _from_folder(source.model, source.path)
    path = Path(source).expanduser()
    if path.exists() and revision is not None:
        raise ValueError(f"revision {revision!r} is for models of the Hugging Face hub; {source!r} is on this machine")
    # The tokenizer alone is enough: no config.json is asked for, no architecture refused.
    if path.is_dir():
        return _from_folder(source, path)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path)
    return load_tokenizer(resolve_model(source, revision=revision, download_dir=download_dir, weights=False))


@overload
def apply_chat_template(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = ...,
    continue_final_message: bool = ...,
    chat_template: str | None = ...,
    tools: Sequence[Mapping[str, Any]] | None = ...,
    tokenize: Literal[False] = ...,
    **kwargs: Any,
) -> str: ...


@overload
def apply_chat_template(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = ...,
    continue_final_message: bool = ...,
    chat_template: str | None = ...,
    tools: Sequence[Mapping[str, Any]] | None = ...,
    tokenize: Literal[True],
    **kwargs: Any,
) -> list[int]: ...


def apply_chat_template(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tokenize: bool = False,
    **kwargs: Any,
) -> str | list[int]:
    """A conversation as the prompt that the model was trained on.

    Args:
        messages: each with a "role", and "content" or what else the template reads.
        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: leave the last message open, for the model to go on with; excludes `add_generation_prompt`.
        chat_template: a Jinja template, or the name of one of the tokenizer's, instead of its default.
        tools: JSON schemas of functions.
        tokenize: give token ids; special tokens are those of the template only, as in the text.
        kwargs: further variables of the template.

    Raises:
        ValueError: if there is no template, a message is malformed, the two options exclude each other, or the template refuses.
    """
    import jinja2

    if add_generation_prompt and continue_final_message:
        raise ValueError("add_generation_prompt and continue_final_message exclude each other")
    if isinstance(messages, str | bytes | Mapping) or not messages:
        raise ValueError(f"messages must be a list of at least one message, got {messages!r}")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{position}] must be an object with a 'role', got {message!r}")
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path or 'this model'!r} has no chat template; give chat_template")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **kwargs,
        )
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise ValueError(f"the chat template cannot render these messages: {error}") from error
    return tokenizer.encode(text, add_special_tokens=False) if tokenize else text


def _from_gguf(path: Path) -> "PreTrainedTokenizerFast":
    from jaxllm.weights.gguf import GgufFile
    from jaxllm.weights.gguf_tokenizer import build_tokenizer

    backend, config = build_tokenizer(GgufFile(path))
    template = config.pop("chat_template", None)
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    return _import_fast()(tokenizer_object=backend, name_or_path=str(path), chat_template=template, **config)


def _from_folder(model: str, folder: Path) -> "PreTrainedTokenizerFast":
    fast = _import_fast()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"model {model!r}: no usable tokenizer in {folder} ({error})") from error
    if not isinstance(tokenizer, fast):
        raise ValueError(f"model {model!r}: {type(tokenizer).__name__} is no fast tokenizer; add a tokenizer.json to {folder}")
    return tokenizer


def _import_fast() -> "type[PreTrainedTokenizerFast]":
    # Without torch, transformers says so on import; nothing here needs it.
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        if before is None:
            del os.environ[quiet]
        else:
            os.environ[quiet] = before
    return PreTrainedTokenizerFast
