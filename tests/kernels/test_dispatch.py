"""Which implementation runs."""

import logging

import jax
import pytest

from kernels_pallas import dispatch
from kernels_pallas.dispatch import choose, log_choice
from kernels_pallas.paged_attention import Call, implementations, select_implementation

CALL = Call(num_heads=8, num_kv_heads=2, head_dim=128, block_size=32, dtype="bfloat16")


def test_auto_takes_the_first_that_can_be_used():
    assert choose("test_operation", "auto", {"fast": "it rains", "plain": None, "other": None}) == "plain"


def test_the_choice_is_logged_once_with_the_reasons(caplog):
    with caplog.at_level(logging.INFO, logger="kernels_pallas.dispatch"):
        for _ in range(2):
            log_choice("test_operation", "plain", {"fast": "it rains", "plain": None, "other": "never"})
    assert caplog.messages == ["test_operation: plain on cpu (not fast: it rains)"]


def test_a_named_one_is_an_order():
    assert choose("test_operation", "other", {"plain": None, "other": None}) == "other"
    with pytest.raises(ValueError, match="'fast' of test_operation cannot be used: it rains"):
        choose("test_operation", "fast", {"fast": "it rains", "plain": None})
    with pytest.raises(ValueError, match="one of auto, plain, got 'magic'"):
        choose("test_operation", "magic", {"plain": None})


def test_nothing_that_runs_is_an_error():
    with pytest.raises(ValueError, match=r"no implementation of test_operation can be used here \(fast: it rains\)"):
        choose("test_operation", "auto", {"fast": "it rains"})


def on_device(monkeypatch, capability):
    """As on a GPU of this compute capability."""

    class Device:
        platform = "gpu"
        compute_capability = capability

    monkeypatch.setattr(implementations, "target_platform", lambda: "gpu")
    monkeypatch.setattr(implementations, "unavailable_reason", lambda: None)
    monkeypatch.setattr(jax, "devices", lambda: [Device()])


@pytest.fixture
def no_llvm(monkeypatch):
    """As on a processor without AVX-512."""
    monkeypatch.setattr(implementations, "llvm_refusal", lambda **_: "this processor has no avx512f")


@pytest.mark.usefixtures("no_llvm")
def test_on_a_cpu_the_reference_runs_and_kernels_for_gpus_by_name_only(monkeypatch):
    monkeypatch.setattr(implementations, "unavailable_reason", lambda: None)
    for name, expected in (("auto", "reference"), ("mosaic", "mosaic"), ("triton", "triton")):
        assert select_implementation(name, CALL) == expected
    with pytest.raises(ValueError, match="'llvm' of paged_attention cannot be used: this processor has no avx512f"):
        select_implementation("llvm", CALL)


def test_on_a_cpu_with_avx512_llvm_runs_and_is_compiled_at_once(monkeypatch):
    registered = []
    monkeypatch.setattr(implementations, "llvm_refusal", lambda **_: None)
    monkeypatch.setattr(implementations, "register_paged_attention", lambda *arguments: registered.append(arguments))
    assert select_implementation("reference", CALL) == "reference"
    assert registered == []
    for name in ("auto", "llvm"):
        assert select_implementation(name, CALL) == "llvm"
    assert registered == [("bfloat16", 128)] * 2


def test_llvm_runs_on_cpus_only(monkeypatch):
    on_device(monkeypatch, "9.0")
    with pytest.raises(ValueError, match="'llvm' of paged_attention cannot be used: it runs on CPUs, not on gpu"):
        select_implementation("llvm", CALL)


def test_a_hopper_gpu_takes_mosaic(monkeypatch):
    on_device(monkeypatch, "9.0")
    monkeypatch.setattr(implementations, "self_test", lambda *_: None)
    assert select_implementation("auto", CALL) == "mosaic"


@pytest.mark.parametrize(
    ("capability", "expected"), [("7.5", "reference"), ("8.0", "triton"), ("8.9", "triton"), ("10.0", "reference")]
)
def test_other_gpus_do_not(monkeypatch, capability, expected):
    on_device(monkeypatch, capability)
    monkeypatch.setattr(implementations, "self_test", lambda *_: None)
    assert select_implementation("auto", CALL) == expected
    with pytest.raises(ValueError, match="'mosaic' of paged_attention cannot be used: it needs a Hopper GPU"):
        select_implementation("mosaic", CALL)


def test_triton_by_name_serves_newer_gpus_but_no_older_ones(monkeypatch):
    monkeypatch.setattr(implementations, "self_test", lambda *_: None)
    on_device(monkeypatch, "10.0")
    assert select_implementation("triton", CALL) == "triton"
    on_device(monkeypatch, "7.5")
    with pytest.raises(ValueError, match="'triton' of paged_attention cannot be used: it needs an NVIDIA GPU of compute capab"):
        select_implementation("triton", CALL)


def test_triton_serves_hopper_what_mosaic_does_not(monkeypatch, caplog):
    on_device(monkeypatch, "9.0")
    monkeypatch.setattr(implementations, "self_test", lambda *_: None)
    monkeypatch.setattr(dispatch, "target_platform", lambda: "gpu")
    with caplog.at_level(logging.INFO, logger="kernels_pallas.dispatch"):
        assert select_implementation("auto", CALL._replace(dtype="float32")) == "triton"
    assert caplog.messages == ["paged_attention: triton on gpu (not mosaic: dtype float32 is not bfloat16 or float16)"]


def test_without_jax_triton_the_reference_runs(monkeypatch, caplog):
    on_device(monkeypatch, "8.6")
    monkeypatch.setattr(implementations, "unavailable_reason", lambda: "jax-triton is not installed")
    with caplog.at_level(logging.INFO, logger="kernels_pallas.dispatch"):
        assert select_implementation("auto", CALL) == "reference"
    assert "not triton: jax-triton is not installed" in caplog.text


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "uint8"])
@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [("8.0", "bfloat16", "triton"), ("8.9", "float16", "triton"), ("8.9", "float32", "triton"), ("9.0", "float32", "triton"),
     ("9.0", "bfloat16", "mosaic"), ("7.5", "bfloat16", "reference")],
)  # fmt: skip
def test_who_serves_a_cache_of_8_bits(monkeypatch, capability, dtype, expected, cache_dtype):
    on_device(monkeypatch, capability)
    monkeypatch.setattr(implementations, "self_test", lambda *_: None)
    assert select_implementation("auto", CALL._replace(dtype=dtype, cache_dtype=cache_dtype)) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache_dtype": "float32"}, "the KV cache is float32, not bfloat16 as the queries are"),
        (
            {"head_dim": 144, "dtype": "float32", "cache_dtype": "float8_e4m3fn"},
            "head size 144 is more than 128, with float32 queries and a KV cache of 8-bit numbers",
        ),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not bfloat16, float16 or float32"),
        ({"head_dim": 72}, "head size 72 is not a multiple of 16 up to 256"),
        ({"head_dim": 512}, "head size 512 is not a multiple of 16 up to 256"),
        ({"num_heads": 66}, "33 query heads share a KV head, more than 32"),
    ],
)
def test_what_triton_does_not_serve(monkeypatch, change, reason):
    on_device(monkeypatch, "8.0")
    call = CALL._replace(**change)
    with pytest.raises(ValueError, match=reason):
        select_implementation("triton", call)
    assert select_implementation("auto", call) == "reference"


def test_a_kernel_that_fails_its_self_test_is_passed_over(monkeypatch, caplog):
    on_device(monkeypatch, "9.0")
    monkeypatch.setattr(implementations, "self_test", lambda *_: "it differs from the reference by 3")
    assert select_implementation("auto", CALL) == "reference"
    assert "mosaic fails its self-test and is not used: it differs from the reference by 3" in caplog.text
    with pytest.raises(RuntimeError, match="'mosaic' of paged_attention fails its self-test: it differs"):
        select_implementation("mosaic", CALL)


def test_the_self_test_tells_right_from_wrong(monkeypatch):
    call = CALL._replace(num_heads=2, head_dim=16, dtype="float32")
    right = implementations.np.max
    monkeypatch.setattr(implementations.np, "max", lambda values: right(values) + 1)
    assert implementations.self_test("reference", call, None) == "it differs from the reference by 1"


def test_the_self_test_reports_what_a_compiler_raises():
    report = implementations.self_test("magic", CALL, None)
    assert report.startswith("ValueError: implementation of paged_attention must be one of auto, ")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "dtype float32 is not bfloat16 or float16"),
        ({"dtype": "float32", "cache_dtype": "uint8"}, "dtype float32 is not bfloat16 or float16"),
        ({"cache_dtype": "float32"}, "the KV cache is float32, not bfloat16 as the queries are"),
        ({"head_dim": 72}, "head size 72 is not one of 64, 80, 96, 128, 256"),
        ({"block_size": 8}, "block size 8 is not one of 16, 32, 64"),
        ({"num_heads": 64}, "32 query heads share a KV head, more than 16"),
        ({"num_heads": 32, "max_decode_queries": 5}, "5 queries of 16 heads are more than a tile of 64"),
    ],
)
@pytest.mark.usefixtures("no_llvm")
def test_what_mosaic_does_not_serve_falls_down_the_chain(change, reason):
    call = CALL._replace(**change)
    with pytest.raises(ValueError, match=reason):
        select_implementation("mosaic", call)
    assert select_implementation("auto", call) == "reference"
