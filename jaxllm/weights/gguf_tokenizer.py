"""The tokenizer that the metadata of a GGUF file describes, as a `tokenizers.Tokenizer`.

transformers' own conversion needs torch and has no pre-tokenizer for SmolLM. What a `tokenizer.ggml.pre` means (patterns,
whether a whole word goes before its merges, whether BOS is added) is defined by llama.cpp's src/llama-vocab.cpp; the patterns
are those of the models' own tokenizer.json.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxllm.weights.gguf import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# `tokenizer.ggml.token_type`
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before merging: each pattern in turn cuts what the ones before it left.

    Attributes:
        ignore_merges: a word that is a token is taken whole, whether or not merges lead to it.
        add_bos: where the file does not say.
        nfc: Unicode normalization goes first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_LLAMA3_PRE = _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "qwen2": _PreTokenizer((_QWEN2,), nfc=True),
}


def build_tokenizer(file: GgufFile) -> "tuple[Tokenizer, dict[str, Any]]":
    """The tokenizer, and what goes beside it into a tokenizer_config.json (special tokens, chat template).

    Raises:
        ValueError: naming the kind of tokenizer or of pre-tokenizer that is not supported, or what is missing or wrong.
    """
    get = _getter(file)
    kind = get("model")
    tokens: list[str] = get("tokens") or []
    types: list[int] = get("token_type") or [_NORMAL] * len(tokens)
    if not tokens:
        raise ValueError(f"{file.path}: it holds no tokenizer; name one with `tokenizer`")
    if len(types) != len(tokens):
        raise ValueError(f"{file.path}: {len(types)} token types for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{file.path}: a token is given twice")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(file, tokens, types)
    else:
        raise ValueError(
            f"{file.path}: tokenizer {kind!r} is not supported ('gpt2' and 'llama' are); name a Hugging Face one with `tokenizer`"
        )
    _add_tokens(tokenizer, tokens, types)

    def flag(name: str, default: bool) -> bool:
        value = get(name)
        return default if value is None else bool(value)

    # Sentencepiece models that do not say have these ids.
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    config: dict[str, Any] = {
        "add_bos_token": flag("add_bos_token", add_bos),
        "add_eos_token": flag("add_eos_token", False),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = get(f"{key}_token_id")
        index = defaults.get(key) if index is None else index
        if index is not None:
            if index >= len(tokens):
                raise ValueError(f"{file.path}: tokenizer.ggml.{key}_token_id {index} is not in the vocabulary of {len(tokens)}")
            config[f"{name}_token"] = tokens[index]
    context_len = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
    if context_len:
        config["model_max_length"] = context_len
    template = _chat_template(file)
    if template:
        config["chat_template"] = template
    _add_special_tokens(file, tokenizer, config)
    return tokenizer, config


def _byte_level(file: GgufFile, tokens: list[str]) -> "tuple[Tokenizer, bool]":
    """GPT-2's kind of BPE; also whether it adds BOS if the file does not say."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    get = _getter(file)
    pre = get("pre")
    if pre not in _PRE_TOKENIZERS:
        said = f"tokenizer.ggml.pre {pre!r} is not supported" if pre else "it does not say how text is cut (tokenizer.ggml.pre)"
        raise ValueError(
            f"{file.path}: {said}; supported: {', '.join(_PRE_TOKENIZERS)}. Name a Hugging Face tokenizer with `tokenizer`"
        )
    if get("add_space_prefix"):
        raise ValueError(f"{file.path}: tokenizer.ggml.add_space_prefix is not supported for tokenizer 'gpt2'")
    rules = _PRE_TOKENIZERS[pre]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in get("merges") or []]
    try:
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=rules.ignore_merges))
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"{file.path}: tokenizer.ggml.merges do not fit the vocabulary ({error})") from error
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> "tuple[Tokenizer, bool]":
    """Sentencepiece's kind of BPE: pieces with scores, spaces as "▁", unknown characters as bytes. It adds BOS by default."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    get = _getter(file)
    scores = get("scores") or []
    if len(scores) != len(tokens):
        raise ValueError(f"{file.path}: {len(scores)} scores for {len(tokens)} tokens")
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _USER_DEFINED and "▁" in token:
            raise ValueError(f"{file.path}: the user-defined token {token!r} with a space mark is not supported")
    prefix = get("add_space_prefix")
    prefix = True if prefix is None else prefix
    unknown = get("unknown_token_id")
    vocab = {token: index for index, token in enumerate(tokens)}
    normal = {token: scores[i] for i, token in enumerate(tokens) if types[i] == _NORMAL}
    tokenizer = Tokenizer(
        models.BPE(vocab, _merges(normal, vocab), unk_token=tokens[unknown or 0], fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoder, decoders.Strip(" ", 1, 0)] if prefix else decoder)
    return tokenizer, True


def _merges(scores: dict[str, float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best piece first: the pair that makes the piece of the highest score
    is merged first, as sentencepiece does."""
    pairs = [
        (-score, vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    pairs.sort()
    return [(left, right) for *_, left, right in pairs]


def _add_tokens(tokenizer: "Tokenizer", tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are found in the text as they are; the former are special."""
    from tokenizers import AddedToken

    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == kind
        ]
        if added:
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _add_special_tokens(file: GgufFile, tokenizer: "Tokenizer", config: dict[str, Any]) -> None:
    """BOS before and EOS after every text, where the file wants them."""
    from tokenizers import processors

    before, after = (config[f"add_{name}_token"] for name in ("bos", "eos"))
    names = [name for name, wanted in (("bos", before), ("eos", after)) if wanted]
    for name in names:
        if f"{name}_token" not in config:
            raise ValueError(f"{file.path}: tokenizer.ggml.add_{name}_token is set but there is no {name} token")
    if names:
        first = f"{config['bos_token']} " if before else ""
        last = f" {config['eos_token']}" if after else ""
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first}$A{last}",
            pair=f"{first}$A{last} {first}$B:1{last}",
            special_tokens=[(config[f"{name}_token"], tokenizer.token_to_id(config[f"{name}_token"])) for name in names],
        )


def _chat_template(file: GgufFile) -> str | list[dict[str, str]] | None:
    get = file.metadata.get
    template = get("tokenizer.chat_template")
    names = get("tokenizer.chat_templates", ())
    named = {name: text for name in names if (text := get(f"tokenizer.chat_template.{name}"))}
    if not named:
        return template
    if template:
        named["default"] = template
    return [{"name": name, "template": text} for name, text in named.items()]


def _getter(file: GgufFile) -> Callable[[str], Any]:
    return lambda key: file.metadata.get(f"tokenizer.ggml.{key}")
