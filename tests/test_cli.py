import argparse
import json
import subprocess
import sys

import pytest

from jaxllm import cli
from jaxllm.engine.cli_args import (
    ArgumentParser,
    add_engine_args,
    attribute_docs,
    engine_args_of,
    human_int,
    int_list,
    json_object,
)
from jaxllm.engine.engine_args import EngineArgs


def parse(*argv: str) -> EngineArgs:
    parser = ArgumentParser()
    add_engine_args(parser)
    return engine_args_of(parser.parse_args(argv))


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("-1", -1), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("2M", 2 * 2**20), ("1g", 10**9)],
)
def test_human_int(text, value):
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "x", "1.5", "3kk", "1e3", "0x10"])
def test_no_human_int(text):
    with pytest.raises(argparse.ArgumentTypeError, match="invalid integer"):
        human_int(text)


def test_lists_and_objects():
    assert int_list("1,2k") == [1, 2000]
    assert json_object('{"a": 1}') == {"a": 1}
    for text in ("[1]", "{", "1"):
        with pytest.raises(argparse.ArgumentTypeError, match="JSON"):
            json_object(text)


def test_every_engine_argument_is_a_flag_with_its_default():
    assert parse() == EngineArgs()


def test_flags():
    args = parse(
        "--max-model-len", "4K", "--max_num_seqs=3", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.5",
        "--hf-overrides", '{"rope_theta": 5.0}', "--compile-sizes", "16,64", "--model", "a_b/c_d",
    )  # fmt: skip
    assert args.max_model_len == 4096
    assert args.max_num_seqs == 3
    assert args.enable_prefix_caching is False
    assert args.gpu_memory_utilization == 0.5
    assert args.hf_overrides == {"rope_theta": 5.0}
    assert args.compile_sizes == [16, 64]
    assert args.model == "a_b/c_d"


def test_every_engine_argument_is_explained():
    docs = attribute_docs(EngineArgs)
    assert [name for name in EngineArgs.__dataclass_fields__ if not docs.get(name)] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "--promt", "x"], "unknown argument '--promt'; did you mean '--prompt'?"),
        (["generate", "--prompt", "x", "--max-model-length", "5"], "did you mean '--max-model-len'?"),
        (["generate", "--prompt", "x", "--max-num-seqs", "many"], "invalid integer 'many'"),
        (["generate", "--prompt", "x", "--temperature", "hot"], "invalid float value: 'hot'"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_flags(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate"], "give a prompt with --prompt or --prompt-file"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature must be in [0, 2], got -1.0"),
        (["generate", "--prompt", "x", "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["generate", "--prompt", "x", "--model", "no/such/place"], "no/such/place"),
        (["generate", "--prompt-file", "no-such-file"], "--prompt-file no-such-file: No such file"),
        (["chat", "--model", "nowhere.gguf"], "nowhere.gguf"),
        (["convert", "nowhere.gguf", "out"], "nowhere.gguf"),
    ],
)
def test_wrong_values_end_with_one_line(argv, message, capsys):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith(f"jaxllm {argv[0]}: error: ")
    assert "Traceback" not in err


def test_help():
    done = subprocess.run([sys.executable, "-m", "jaxllm", "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert all(name in done.stdout for name in ("generate", "chat", "convert"))


SMALL = ["--max-model-len", "512", "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--cudagraph-capture-sizes", "2",
         "--compile-sizes", "64", "--no-use-tqdm-on-load"]  # fmt: skip


@pytest.fixture
def small(pytestconfig: pytest.Config) -> list[str]:
    assert pytestconfig.cache is not None
    return [*SMALL, "--compilation-cache-dir", str(pytestconfig.cache.mkdir("compiled"))]


def test_generate(small, capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One, two, three,\n\n")
    argv = ["generate", *small, "--prompt", "The capital of France is", "--prompt-file", str(prompts), "--temperature", "0"]
    assert cli.main([*argv, "--max-tokens", "8"]) == 0
    lines = capsys.readouterr().out
    assert "The capital of France is Paris." in lines
    assert "One, two, three, four" in lines
    assert cli.main([*argv, "--max-tokens", "2", "--json", "--stop", "zzz"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records[0] == {
        "prompt": "The capital of France is",
        "text": " Paris.",
        "token_ids": [7042, 30],
        "finish_reason": "length",
    }


def test_chat(small, capsys, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\nAnd of Italy?\n"))
    assert cli.main(["chat", *small, "--temperature", "0", "--max-tokens", "16"]) == 0
    captured = capsys.readouterr()
    assert "Paris" in captured.out
    assert "Rome" in captured.out
    assert captured.err.count("tokens/s]") == 2


def test_convert_gives_the_same_tokens(small, capsys, tmp_path):
    out = tmp_path / "orbax"
    assert cli.main(["convert", "smollm2-135m-instruct", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    argv = ["generate", *small, "--prompt", "The capital of France is", "--temperature", "0", "--max-tokens", "12", "--json"]
    texts = []
    for model in ("smollm2-135m-instruct", str(out)):
        assert cli.main([*argv, "--model", model]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1]
    assert texts[0][0] == 7042
    assert cli.main(["convert", "smollm2-135m-instruct", str(out)]) == 2
    assert str(out) in capsys.readouterr().err
