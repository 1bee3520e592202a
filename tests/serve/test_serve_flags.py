"""The command line: flags, files, and what vLLM's flags do."""

import argparse
import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.engine.engine_args import EngineArgs
from jaxllm.serve import cli
from jaxllm.serve.args import ServeArgs
from jaxllm.serve.chat_prompt import load_chat_template
from jaxllm.serve.cli import EXIT_USAGE, GROUPS, main, make_parser, parse
from jaxllm.serve.vllm_flags import NOTED, REFUSED


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of what the command line says before it ends with EXIT_USAGE."""
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == EXIT_USAGE
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_nothing_serves_the_demo_model_on_port_8000():
    serve, engine, notes = parse([])
    assert (serve, engine, notes) == (ServeArgs(), EngineArgs(), [])
    assert (engine.model, serve.port) == ("smollm2-135m-instruct", 8000)


def test_every_field_has_a_flag_in_one_group():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(field.name for field in dataclasses.fields(ServeArgs))
    assert all(field.name in (ServeArgs.__doc__ or "") for field in dataclasses.fields(ServeArgs))


def test_flags():
    serve, engine, _ = parse([
        "some/model", "--max_model_len", "32k", "--max-num-batched-tokens=2K", "--served-model-name", "a", "b", "--api-key", "x",
        "--allowed-origins", '["https://a", "https://b"]', "--no-enable-prefix-caching", "--enable-auto-tool-choice",
        "--tool-call-parser", "hermes", "--hf-overrides.rope_theta", "10000", "--hf-overrides.a.b=c", "-tp", "2",
        "--shutdown-timeout", "2.5", "--port", "0", "--default-chat-template-kwargs", '{"enable_thinking": false}',
    ])  # fmt: skip
    assert (engine.model, engine.max_model_len, engine.max_num_batched_tokens) == ("some/model", 32000, 2048)
    assert (engine.enable_prefix_caching, engine.tensor_parallel_size) == (False, 2)
    assert engine.hf_overrides == {"rope_theta": 10000, "a": {"b": "c"}}
    assert serve.served_model_name == ("a", "b")
    assert serve.allowed_origins == ("https://a", "https://b")
    assert (serve.api_key, serve.port, serve.shutdown_timeout) == (("x",), 0, 2.5)
    assert serve.default_chat_template_kwargs == {"enable_thinking": False}


def test_api_key_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXLLM_API_KEY", "secret")
    assert parse([])[0].api_key == ("secret",)
    assert parse(["--api-key", "other"])[0].api_key == ("other",)


def test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: some/model\nmax_model_len: 4k\nport: 1234\nserved-model-name: [a, b]\nenable_prefix_caching: false\n"
        "dev-mode: true\nhf-overrides:\n  rope_theta: 5\ntensor-parallel-size: 1\n"
    )
    serve, engine, _ = parse(["--config", str(path), "--port", "4321"])
    assert (engine.model, engine.max_model_len, engine.enable_prefix_caching) == ("some/model", 4000, False)
    assert (serve.port, serve.served_model_name, serve.dev_mode) == (4321, ("a", "b"), True)
    assert engine.hf_overrides == {"rope_theta": 5}
    for text, message in (
        ("- a", "must hold flags as keys, got list"),
        ("a: [", "serve.yaml"),
        ("port:", "port must have a value"),
        ("config: other.yaml", "files do not name other files"),
        ("max_model_length: 5", "did you mean '--max-model-len'?"),
    ):
        path.write_text(text)
        assert message in refused(["--config", str(path)], capsys)
    assert "No such file" in refused(["--config", str(tmp_path / "missing.yaml")], capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-model-length", "5"], "unknown argument '--max-model-length'; did you mean '--max-model-len'?"),
        (["--tool-call-parsr", "hermes"], "did you mean '--tool-call-parser'?"),
        (["--port", "70000"], "--port must be in [0, 65535], got 70000"),
        (["--port", "x"], "invalid integer 'x'"),
        (["--tool-call-parser", "x"], "--tool-call-parser must be one of hermes, llama3_json, got 'x'"),
        (["--reasoning-parser", "x"], "--reasoning-parser must be one of deepseek_r1, qwen3, got 'x'"),
        (["--enable-auto-tool-choice"], "--enable-auto-tool-choice needs --tool-call-parser"),
        (["--ssl-keyfile", "a"], "--ssl-keyfile and --ssl-certfile go together"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout must be at least 0 seconds, got -1.0"),
        (["--shutdown-timeout", "inf"], "--shutdown-timeout must be at least 0 seconds, got inf"),
        (["--max-body-size", "0"], "--max-body-size must be at least 1, got 0"),
        (["--max-log-len", "-1"], "--max-log-len must be at least 0, got -1"),
        (["--uvicorn-log-level", "loud"], "--uvicorn-log-level must be one of"),
        (["--root-path", "api/"], "--root-path must begin with a slash and not end with one, got 'api/'"),
        (["--response-role", ""], "--response-role must not be empty"),
        (["--chat-template-content-format", "x"], "must be one of auto, string, openai, got 'x'"),
        (["--allowed-origins", "[1]"], "must be a list of strings, got [1]"),
        (["--allowed-origins", "[a"], "invalid JSON '[a'"),
        (["--hf-overrides.a"], "expected one argument"),
        (["--quantization", "awq"], "argument --quantization: not supported: weights are served as they are stored"),
        (["-q", "awq"], "argument --quantization"),
        (["--enable-lora"], "argument --enable-lora: not supported"),
        (["-dcp", "2"], "argument --decode-context-parallel-size"),
        (["--speculative-config", "{}"], "argument --speculative-config: not supported"),
    ],
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert message in refused(argv, capsys)


def test_flags_of_vllm():
    """Those without meaning are accepted with a note; those that ask for nothing are accepted silently."""
    _, engine, notes = parse([
        "--trust-remote-code", "--compilation-config", '{"mode": 3}', "--compilation-config.level", "2", "-O3", "-asc", "4",
        "--quantization", "none", "-pp", "1", "--kv-cache-dtype", "auto", "--enforce-eager",
    ])  # fmt: skip
    assert engine.enforce_eager
    assert [note.split(" ")[0] for note in notes] == [
        "--trust-remote-code", "--compilation-config", "--optimization-level", "--compilation-config",
    ]  # fmt: skip
    assert all("has no effect: " in note for note in notes)
    assert not NOTED.keys() & REFUSED.keys()
    # Neither says that a flag which jaxllm has does nothing: `add_vllm_flags` adds what is missing, so it must be missing.
    added = {option for action in make_parser()._actions if action.dest == argparse.SUPPRESS for option in action.option_strings}
    assert added >= NOTED.keys() | REFUSED.keys()
    known = {option for action in make_parser()._actions for option in action.option_strings}
    assert known >= NOTED.keys() | REFUSED.keys()
    assert all(why for why in NOTED.values())


def test_data_parallel_flags(capsys: pytest.CaptureFixture[str]):
    serve, engine, notes = parse(["-dp", "8", "-dpl", "4", "-dpr", "4", "--data-parallel-hybrid-lb", "-asc", "3"])
    assert (engine.data_parallel_size, engine.data_parallel_size_local, engine.data_parallel_start_rank) == (8, 4, 4)
    assert (engine.data_parallel_hybrid_lb, serve.api_server_count, notes) == (True, 3, [])
    _, engine, _ = parse(["-dp", "2", "-dpn", "1", "--data-parallel-external-lb", "--data-parallel-backend", "mp"])
    assert (engine.data_parallel_rank, engine.data_parallel_external_lb) == (1, True)
    assert "--api-server-count must be at least 1, got 0" in refused(["-asc", "0"], capsys)


def test_headless_flags(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    serve, engine, notes = parse([
        "--headless", "-dp", "4", "-dpl", "2", "-dpr", "2", "--data-parallel-address", "10.0.0.1",
        "--data-parallel-rpc-port", "1k", "--port", "80",
    ])  # fmt: skip
    assert (serve.headless, notes) == (True, [])
    assert (engine.data_parallel_address, engine.data_parallel_rpc_port) == ("10.0.0.1", 1000)
    message = "--headless serves nothing: --api-server-count must be 1, got 2"
    assert message in refused(["--headless", "-asc", "2"], capsys)
    for wrong, message in (
        (["--data-parallel-backend", "ray"], "headless excludes data_parallel_backend 'ray'"),
        (["--data-parallel-hybrid-lb"], "headless excludes data_parallel_hybrid_lb"),
        (["-dpn", "1"], "headless excludes data_parallel_rank"),
        (["--nnodes", "2"], "headless with nnodes 2 is for node_rank 1 and above"),
    ):
        assert main(["--headless", "-dp", "4", *wrong]) == EXIT_USAGE
        assert message in capsys.readouterr().err
    # Workers of an engine on several machines are no engines.
    monkeypatch.setattr(cli, "run_node", lambda args, usage: 7)
    assert main(["--headless", "--nnodes", "2", "--node-rank", "1"]) == 7


def test_the_documentation_lists_them():
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    for flag, why in {**NOTED, **{flag: why for flag, (_, why) in REFUSED.items()}}.items():
        [line] = [line for line in text.splitlines() if f"`{flag}`" in line and line.startswith("|")]
        assert line.endswith(f"| {why} |")


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m jaxllm.serve [MODEL] [flags]\n")
    assert [text.index(f"\n{title}:") for title in (*GROUPS, "engine")] == sorted(
        text.index(f"\n{title}:") for title in (*GROUPS, "engine")
    )
    assert "--quantization" not in text


def test_templates(tmp_path: Path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    assert load_chat_template(str(path)) == load_chat_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ValueError, match=r"--chat-template 'nothing' is no template, and no file"):
        load_chat_template("nothing")


def test_a_model_that_does_not_exist(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR):
        assert main(["--model", "/does/not/exist", "--host", "127.0.0.1", "--port", "0"]) == EXIT_USAGE
    assert "jaxllm.serve: error: " in capsys.readouterr().err


def test_the_front_end_imports_no_jax():
    code = (
        "import sys, jaxllm.serve.cli, jaxllm.serve.server, jaxllm.engine.async_llm, jaxllm.tokenizer; import transformers; "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


def test_the_jaxllm_command_serves_too(capsys: pytest.CaptureFixture[str]):
    from jaxllm.cli import main as jaxllm

    with pytest.raises(SystemExit) as caught:
        jaxllm(["serve", "--nonsense"])
    assert caught.value.code == EXIT_USAGE
    assert "unknown argument '--nonsense'" in capsys.readouterr().err


def test_arguments_as_json(tmp_path: Path):
    """What /server_info gives can be written as JSON."""
    assert json.loads(json.dumps(dataclasses.asdict(ServeArgs())))["port"] == 8000
