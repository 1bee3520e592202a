import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from weight_files import finish, gguf_writer

from jaxllm.tokenizer import load_tokenizer
from jaxllm.weights.gguf import GgufFile
from jaxllm.weights.gguf_tokenizer import build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def build(folder, kind, tokens, types, **metadata):
    """The tokenizer of a file with these tokens."""
    writer = gguf_writer(
        folder / "m.gguf",
        tokenizer__ggml__model=kind,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=types,
        **{f"tokenizer__{'' if key.startswith('chat') else 'ggml__'}{key}": value for key, value in metadata.items()},
    )
    finish(writer)
    return build_tokenizer(GgufFile(folder / "m.gguf"))


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["he", "ll", "hell", "hello", "Ġhello", "12", "123", "..", "'s", "Ċ"]
# "hello" is a token that no merge leads to.
MERGES = ["h e", "l l", "he ll", "1 2", "12 3", ". .", "' s"]
CONTROLS = ["<|begin|>", "<|end|>"]
TOKENS = [*BYTES, *[word for word in WORDS if word not in BYTES], *CONTROLS, "<tool>", "[PAD]"]
TYPES = [NORMAL] * (len(TOKENS) - 4) + [CONTROL, CONTROL, USER_DEFINED, UNUSED]


def bpe(folder, pre="gpt-2", **metadata):
    return build(folder, "gpt2", TOKENS, TYPES, merges=MERGES, **{"pre": pre, **metadata})


def pieces(tokenizer, text):
    return tokenizer.encode(text).tokens


class TestPreTokenizers:
    """The words that a text is cut into, before anything is merged."""

    def words(self, tmp_path, pre, text):
        tokenizer, _ = bpe(tmp_path, pre, add_bos_token=False)
        return [word.replace("Ġ", " ") for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    @pytest.mark.parametrize(
        ("pre", "words"),
        [
            ("gpt-2", ["It", "'s", " 1234", " words", "...", " OK", "'S"]),
            ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " words", "...", " OK", "'", "S"]),
            ("llama-bpe", ["It", "'s", " ", "123", "4", " words", "...", " OK", "'S"]),
            ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " words", "...", " OK", "'S"]),
            ("default", ["It", "'", "s", " ", "123", "4", " words", "...", " OK", "'", "S"]),
        ],
    )
    def test_words(self, tmp_path, pre, words):
        if pre == "gpt-2":
            words = [*words[:-1], "'", "S"]
        assert self.words(tmp_path, pre, "It's 1234 words... OK'S") == words

    def test_gpt2_is_the_librarys_own(self, tmp_path):
        theirs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        ours, _ = bpe(tmp_path)
        for text in ("a  b\n\n c\t\td 12.5 it's", "  x", "héllo 你好 🎉!", "tail  "):
            assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)

    def test_smollm_is_the_librarys_digits(self, tmp_path):
        digits = pre_tokenizers.Digits(individual_digits=True)
        theirs = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        ours, _ = bpe(tmp_path, "smollm")
        for text in ("1, 12, 123 ½ ² 9x9", "in 1969, ٣٤ and Ⅷ", "v1.2.3\n\n4"):
            assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)

    def test_newlines_of_llama3(self, tmp_path):
        assert self.words(tmp_path, "llama-bpe", "a,\n\nb \n c") == ["a", ",ĊĊ", "b", " Ċ", " c"]


class TestByteLevel:
    def test_merges(self, tmp_path):
        tokenizer, config = bpe(tmp_path)
        assert pieces(tokenizer, "hello 12345 he's..\n") == [*("hell", "o", "Ġ", "123", "4", "5", "Ġ", "he", "'s", "..", "Ċ")]
        assert config == {
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 128,
        }

    def test_whole_words_first(self, tmp_path):
        # llama3: a word that is a token needs no merges.
        tokenizer, _ = bpe(tmp_path, "llama-bpe", bos_token_id=TOKENS.index("<|begin|>"), add_bos_token=False)
        assert pieces(tokenizer, "hello hello hell") == ["hello", "Ġhello", "Ġ", "hell"]

    def test_added_tokens(self, tmp_path):
        tokenizer, _ = bpe(tmp_path)
        assert pieces(tokenizer, "<tool>he<|end|>[PAD]") == ["<tool>", "he", "<|end|>", "[", "P", "A", "D", "]"]
        ids = tokenizer.encode("<tool>he<|end|>").ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool>he"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<tool>he<|end|>"
        assert tokenizer.get_vocab_size() == len(TOKENS)

    def test_bos_and_eos(self, tmp_path):
        ids = {"bos_token_id": TOKENS.index("<|begin|>"), "eos_token_id": TOKENS.index("<|end|>")}
        both, _ = bpe(tmp_path, add_bos_token=True, add_eos_token=True, **ids)
        assert pieces(both, "he") == ["<|begin|>", "he", "<|end|>"]
        assert both.encode("he", add_special_tokens=False).tokens == ["he"]
        assert both.encode("he", "ll").tokens == ["<|begin|>", "he", "<|end|>", "<|begin|>", "ll", "<|end|>"]
        # By default llama3 adds BOS and the others add nothing.
        assert pieces(bpe(tmp_path, "llama-bpe", **ids)[0], "he") == ["<|begin|>", "he"]
        assert pieces(bpe(tmp_path, "llama-bpe", add_bos_token=False, **ids)[0], "he") == ["he"]
        assert pieces(bpe(tmp_path, "qwen2", **ids)[0], "he") == ["he"]
        with pytest.raises(ValueError, match="add_bos_token is set but there is no bos token"):
            bpe(tmp_path, "llama-bpe")

    def test_qwen_normalizes(self, tmp_path):
        composed, decomposed = "é", "e\u0301"
        assert pieces(bpe(tmp_path, "qwen2")[0], decomposed) == pieces(bpe(tmp_path, "qwen2")[0], composed)
        assert pieces(bpe(tmp_path, "gpt-2")[0], decomposed) != pieces(bpe(tmp_path, "gpt-2")[0], composed)


class TestTransformers:
    def test_special_tokens_and_template(self, tmp_path):
        ids = {"bos": "<|begin|>", "eos": "<|end|>", "unknown": "[PAD]", "padding": "<|end|>"}
        bpe(
            tmp_path,
            **{f"{key}_token_id": TOKENS.index(token) for key, token in ids.items()},
            chat_template="T{{ messages[0].content }}",
        )
        tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
            "<|begin|>",
            "<|end|>",
            "<|end|>",
            "[PAD]",
        )
        assert tokenizer.eos_token_id == TOKENS.index("<|end|>")
        assert len(tokenizer) == len(TOKENS)
        assert tokenizer.model_max_length == 128
        assert tokenizer.chat_template == "T{{ messages[0].content }}"
        assert tokenizer.encode("he") == [TOKENS.index("he")]

    def test_bos_is_added_once(self, tmp_path):
        bpe(tmp_path, "llama-bpe", bos_token_id=TOKENS.index("<|begin|>"))
        tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
        bos = TOKENS.index("<|begin|>")
        assert tokenizer.encode("he") == [bos, TOKENS.index("he")]
        assert tokenizer.encode("he", add_special_tokens=False) == [TOKENS.index("he")]

    def test_named_templates(self, tmp_path):
        writer = gguf_writer(
            tmp_path / "m.gguf",
            tokenizer__ggml__model="gpt2",
            tokenizer__ggml__pre="gpt-2",
            tokenizer__ggml__tokens=BYTES,
            tokenizer__chat_template="default",
            tokenizer__chat_templates=["tool_use"],
            tokenizer__chat_template__tool_use="with tools",
        )
        finish(writer)
        tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
        assert tokenizer.chat_template == {"default": "default", "tool_use": "with tools"}


class TestRefused:
    @pytest.mark.parametrize("pre", ["deepseek-v3", "tekken"])
    def test_pre(self, tmp_path, pre):
        with pytest.raises(ValueError, match=f"tokenizer.ggml.pre '{pre}' is not supported; supported: default, gpt-2, smollm"):
            bpe(tmp_path, pre)

    def test_no_pre(self, tmp_path):
        with pytest.raises(ValueError, match="it does not say how text is cut"):
            bpe(tmp_path, None)

    @pytest.mark.parametrize("kind", ["bert", "t5"])
    def test_kind(self, tmp_path, kind):
        with pytest.raises(ValueError, match=f"tokenizer '{kind}' is not supported"):
            build(tmp_path, kind, ["a"], [1])

    def test_no_tokenizer(self, tmp_path):
        finish(gguf_writer(tmp_path / "m.gguf"))
        with pytest.raises(ValueError, match="it holds no tokenizer"):
            build_tokenizer(GgufFile(tmp_path / "m.gguf"))

    def test_contradictions(self, tmp_path):
        with pytest.raises(ValueError, match="1 token types for 2 tokens"):
            build(tmp_path, "gpt2", ["a", "b"], [1], pre="gpt-2")
        with pytest.raises(ValueError, match="a token is given twice"):
            build(tmp_path, "gpt2", ["a", "a"], [1, 1], pre="gpt-2")
        with pytest.raises(ValueError, match="merges do not fit the vocabulary"):
            build(tmp_path, "gpt2", ["a", "b"], [1, 1], pre="gpt-2", merges=["a c"])
        with pytest.raises(ValueError, match="merges do not fit the vocabulary"):
            build(tmp_path, "gpt2", ["a", "b"], [1, 1], pre="gpt-2", merges=["ab"])
        with pytest.raises(ValueError, match="eos_token_id 7 is not in the vocabulary of 2"):
            build(tmp_path, "gpt2", ["a", "b"], [1, 1], pre="gpt-2", eos_token_id=7)
        with pytest.raises(ValueError, match="add_space_prefix is not supported"):
            build(tmp_path, "gpt2", ["a", "b"], [1, 1], pre="gpt-2", add_space_prefix=True)
        with pytest.raises(ValueError, match="1 scores for 2 tokens"):
            build(tmp_path, "llama", ["a", "b"], [1, 1], scores=[1.0])
        with pytest.raises(ValueError, match="user-defined token 'a▁' with a space mark"):
            build(tmp_path, "llama", ["a▁", "b"], [USER_DEFINED, 1], scores=[1.0, 2.0])


SP_SPECIAL = ["<unk>", "<s>", "</s>"]
SP_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SP_PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "ca", "cab", "▁▁", "aa", "aaa", "é", "aé", "bca"]
# Made-up preferences in which the longest piece is not the best one.
SP_SCORES = [-8.0, -9.0, -10.0, -11.0, -5.0, -3.0, -2.5, -6.0, -4.0, -1.0, -7.0, -3.5, -2.0, -5.5, -12.0, -1.5, -0.5]
SP_TOKENS = [*SP_SPECIAL, *SP_BYTES, *SP_PIECES, "<tool>"]
SP_TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(SP_PIECES), USER_DEFINED]


def sentencepiece(folder, **metadata):
    scores = [0.0] * 259 + SP_SCORES + [0.0]
    return build(folder, "llama", SP_TOKENS, SP_TYPES, scores=scores, **metadata)


def greedy(text: str) -> list[str]:
    """Sentencepiece's BPE as described: of all neighbours that make a piece, join those whose piece has the highest score."""
    scores = dict(zip(SP_PIECES, SP_SCORES, strict=True))
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joins:
            break
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [piece for part in parts for piece in ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])]


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    return sentencepiece(tmp_path_factory.mktemp("spm"))


class TestSentencepiece:
    def test_by_hand(self, spm):
        tokenizer, config = spm
        # "ca" (-1) before "ab" (-3); "▁" joins "ca" to nothing; then "cab" (-7).
        assert pieces(tokenizer, "cab") == ["<s>", "▁", "cab"]
        assert pieces(tokenizer, "ab ab") == ["<s>", "▁ab", "▁ab"]
        assert pieces(tokenizer, "") == ["<s>"]
        assert {name: config[f"{name}_token"] for name in ("bos", "eos", "unk")} == {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}

    def test_bytes(self, spm):
        tokenizer, _ = spm
        encoding = tokenizer.encode("aü🎉é")
        assert encoding.tokens[1:] == ["▁a", "<0xC3>", "<0xBC>", "<0xF0>", "<0x9F>", "<0x8E>", "<0x89>", "é"]
        assert tokenizer.decode(encoding.ids) == "aü🎉é"

    @given(st.text("abcé x", max_size=12))
    @settings(max_examples=200, deadline=None)
    def test_against_the_definition(self, spm, text):
        encoding = spm[0].encode(text, add_special_tokens=False)
        assert encoding.tokens == greedy(text)
        assert spm[0].decode(encoding.ids) == text

    def test_added_tokens(self, spm):
        tokenizer, _ = spm
        # Each stretch between added tokens starts with a space mark of its own, as llama.cpp has it.
        assert pieces(tokenizer, "a<tool>ab</s>") == ["<s>", "▁a", "<tool>", "▁ab", "</s>"]

    def test_flags(self, tmp_path):
        assert pieces(sentencepiece(tmp_path, add_space_prefix=False)[0], "ab a") == ["<s>", "ab", "▁a"]
        assert pieces(sentencepiece(tmp_path, add_bos_token=False, add_eos_token=True)[0], "a") == ["▁a", "</s>"]

    def test_transformers(self, tmp_path):
        sentencepiece(tmp_path)
        tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
        ids = tokenizer.encode("cab aü")
        assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁", "cab", "▁a", "<0xC3>", "<0xBC>"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "cab aü"
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
