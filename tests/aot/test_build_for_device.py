"""`python -m jaxllm.build --device`: steps for a GPU that is not here, serialized."""

import json
import pickle
import zlib

import pytest
from tiny_configs import LAYER_1

from jaxllm import LLM
from jaxllm.build import main
from kernels_pallas.aot import unavailable_reason

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
]
SIZES = ["--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--cudagraph-capture-sizes", "1,2", "--compile-sizes", "32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LAYER_1))
    return ["--model", str(folder), "--load-format", "dummy", "--skip-tokenizer-init", "--num-gpu-blocks-override", "64"]


@pytest.fixture(scope="module")
def built(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("built")
    assert main([*model, *SIZES, "--device", "h200", "--tensor-parallel-size", "2", "--out", str(out)]) == 0
    return out


def test_every_step_is_compiled_and_serialized(built):
    manifest = json.loads((built / "manifest.json").read_text())
    assert manifest["num_blocks"] == 64
    assert manifest["facts"]["devices"] == repr([("gpu", "NVIDIA H200", device) for device in range(2)])
    assert "jax-cuda" in manifest["facts"]["backend"]
    programs = sorted(built.glob("*.program"))
    assert [path.name.rsplit("-", 1)[0] for path in programs] == ["decode-1", "decode-2", "mixed-32"]
    for path in programs:
        executable, _, _ = pickle.loads(zlib.decompress(path.read_bytes()))
        assert b"sm_90" in executable


def test_here_it_is_refused_by_name(model, built):
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "use_tqdm_on_load": False}
    with pytest.raises(ValueError, match=r"does not fit; build it anew.*devices: built for \[\('gpu', 'NVIDIA H200"):
        LLM(model[1], compiled_dir=str(built), **options)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "h900"], "--device must be one of h200, h100, a100, b200"),
        (["--device", "h200", "--pipeline-parallel-size", "2"], "pipeline_parallel_size 2"),
        (["--device", "h200", "--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"], "'mp' with 2 workers"),
    ],
)
def test_refusals(model, tmp_path, capsys, flags, message):
    assert main([*model, *SIZES, *flags, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
