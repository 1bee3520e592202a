"""Which engines are here, and which devices they get."""

from typing import Any

import pytest
from toy_engine import make_config

from jaxllm.engine import engine_devices
from jaxllm.engine.data_parallel_args import local_engines
from jaxllm.engine.engine_devices import engine_environment
from jaxllm.parallel_config import ParallelConfig

NAMES = ("size", "rank", "size_local", "start_rank", "hybrid_lb", "external_lb")
DEFAULTS: dict[str, Any] = dict(zip(NAMES, (8, None, None, None, False, False), strict=True))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (8, 0, 8)),
        ({"size": 1}, (1, 0, 1)),
        ({"size_local": 8}, (8, 0, 8)),
        ({"size_local": 3}, (8, 0, 3)),
        ({"size_local": 0}, (8, 0, 0)),
        ({"rank": 3}, (1, 3, 1)),
        ({"rank": 0, "external_lb": True, "size_local": 1}, (1, 0, 1)),
        ({"hybrid_lb": True, "size_local": 4}, (4, 0, 4)),
        ({"start_rank": 4, "size_local": 4}, (4, 4, 4)),
        ({"start_rank": 0, "size_local": 2, "hybrid_lb": True}, (2, 0, 2)),
    ],
)
def test_local_engines(given: dict[str, Any], found: tuple[int, int, int]) -> None:
    assert local_engines(**{**DEFAULTS, **given}) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"external_lb": True}, "data_parallel_external_lb needs data_parallel_rank"),
        ({"rank": 8}, r"data_parallel_rank must be in \[0, 7\], got 8"),
        ({"rank": -1}, r"data_parallel_rank must be in \[0, 7\], got -1"),
        ({"rank": 1, "hybrid_lb": True}, "excludes data_parallel_hybrid_lb"),
        ({"rank": 1, "start_rank": 0}, "excludes data_parallel_hybrid_lb and start_rank"),
        ({"rank": 1, "size_local": 2}, "data_parallel_size_local must be 1 with data_parallel_rank, got 2"),
        ({"hybrid_lb": True}, "need data_parallel_size_local"),
        ({"start_rank": 6, "size_local": 4}, "data_parallel_start_rank 6 and data_parallel_size_local 4"),
        ({"start_rank": 0, "size_local": 0}, "data_parallel_size_local 0 must lie"),
        ({"size_local": 9}, r"data_parallel_size_local must be in \[0, data_parallel_size 8\], got 9"),
        ({"size_local": -1}, r"data_parallel_size_local must be in \[0, data_parallel_size 8\], got -1"),
    ],
)
def test_mistakes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local_engines(**{**DEFAULTS, **given})


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    config = dataclasses.replace(make_config(data_parallel_size=2), parallel=ParallelConfig(2, data_parallel_size=2))
    monkeypatch.setattr(engine_devices, "detect_platform", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6,7")
    found = [engine_environment(config, index, 2) for index in range(2)]
    assert found == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(ValueError, match="data_parallel_size 2 with 2 devices an engine needs 4 devices, found 3: 4, 5, 6"):
        engine_environment(config, 0, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="found 0: none"):
        engine_environment(config, 0, 2)


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(data_parallel_size=2)
    monkeypatch.setattr(engine_devices, "detect_platform", lambda: "cpu")
    monkeypatch.setattr(engine_devices.os, "sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.delenv("NPROC", raising=False)
    assert engine_environment(config, 0, 2) == {"NPROC": "3"}
    assert engine_environment(config, 0, 9) == {"NPROC": "1"}
    assert engine_environment(config, 0, 1) == {}
    monkeypatch.setenv("NPROC", "5")
    assert engine_environment(config, 0, 2) == {}
