"""Measured sizes of kernels as data, and the search for them with a clock of the test's own."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels_pallas import tune, tuned
from kernels_pallas.aot import TARGETS, devices, lowering_on
from kernels_pallas.paged_attention import Call, launch_config
from kernels_pallas.tuned import Row, Table, file_of, read_rows, write_rows

CALL = Call(32, 8, 128, 32, "bfloat16")
H200 = TARGETS["h200"].device_kind
SIZES = {"tile": 64, "decode_stages": 3, "decode_slots": 33, "min_tiles": 2}


def row(op: str = "mosaic_decode", call: Call = CALL, sizes: dict[str, int] = SIZES) -> Row:
    return Row(op, call._asdict(), sizes, 40.0, 50.0, jax.__version__)


def test_rows_are_read_as_they_were_written(tmp_path: Path):
    rows = (row(), row("mosaic_prefill", sizes={"prefill_stages": 4}), row(call=CALL._replace(block_size=16)))
    path = write_rows(H200, rows, tmp_path)
    assert path.name == "nvidia_h200.json"
    assert set(path.read_text().splitlines()[0]) == set('{"device_kind": "NVIDIA H200", "rows": [')
    key = lambda row: (row.op, row.call["block_size"])  # noqa: E731
    assert sorted(read_rows(H200, tmp_path), key=key) == sorted(rows, key=key)
    assert read_rows("NVIDIA H100 80GB HBM3", tmp_path) == ()
    assert write_rows(H200, (), tmp_path) == path
    assert read_rows(H200, tmp_path) == ()


def test_a_row_is_for_one_call():
    assert row().is_for("mosaic_decode", CALL)
    assert not row().is_for("mosaic_prefill", CALL)
    assert not row().is_for("mosaic_decode", CALL._replace(block_size=64))
    shorter = {name: value for name, value in CALL._asdict().items() if name not in CALL._field_defaults}
    assert Row("mosaic_decode", shorter, SIZES, 1.0, 2.0, "").is_for("mosaic_decode", CALL)
    assert not Row("mosaic_decode", shorter, SIZES, 1.0, 2.0, "").is_for("mosaic_decode", CALL._replace(max_decode_queries=4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ({"device_kind": "NVIDIA H100", "rows": []}, "it is of 'NVIDIA H100', not 'NVIDIA H200'"),
        ({"rows": []}, "device_kind"),
        ({"device_kind": H200, "rows": [{"op": "mosaic_decode"}]}, "missing"),
        ({"device_kind": H200, "rows": [[]]}, "mapping"),
    ],
)
def test_broken_files_are_refused(content: object, message: str, tmp_path: Path):
    path = file_of(H200, tmp_path)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"{path.name} cannot be read: .*{message}"):
        read_rows(H200, tmp_path)


@pytest.mark.parametrize(
    ("op", "sizes", "message"),
    [
        ("decode", {}, "op must be one of mosaic_decode, mosaic_prefill, got 'decode'"),
        ("mosaic_decode", {"prefill_stages": 2}, "sizes of mosaic_decode are tile, .* got 'prefill_stages'"),
        ("mosaic_decode", {"tile": 0}, "tile must be a positive integer, got 0"),
        ("mosaic_decode", {"tile": True}, "tile must be a positive integer, got True"),
    ],
)
def test_rows_are_checked(op: str, sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        row(op, sizes=sizes)


def test_what_comes_with_the_kernels_is_sound():
    for path in tuned.FOLDER.glob("*.json"):
        kind = json.loads(path.read_text())["device_kind"]
        assert file_of(kind) == path
        assert read_rows(kind)


@pytest.mark.aot
def test_launches_take_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    write_rows(H200, [row(), row("mosaic_prefill", sizes={"prefill_stages": 2})], tmp_path)
    measured = Table(tmp_path)
    monkeypatch.setattr("kernels_pallas.paged_attention.table", lambda: measured)
    with lowering_on(Mesh(np.asarray(devices(TARGETS["h200"], 1)), ("tensor",))):
        found, other = launch_config(CALL), launch_config(CALL._replace(block_size=64))
    assert (found.decode_stages, found.decode_slots, found.min_tiles, found.prefill_stages) == (3, 33, 2, 2)
    # By rule: two blocks on each of 132 cores, for 8 KV heads.
    assert (other.decode_stages, other.decode_slots, other.min_tiles, other.prefill_stages) == (2, 33, 4, 3)
    with lowering_on(Mesh(np.asarray(devices(TARGETS["h100"], 1)), ("tensor",))):
        assert launch_config(CALL) == other


class Clock:
    """A timer for `search`: what a call takes with the sizes that are in force."""

    def __init__(self, table: Table, seconds: dict[int, float]) -> None:
        self.table, self.seconds = table, seconds
        self.tried: list[dict[str, int]] = []

    def __call__(self, op: str, call: Call) -> float:
        sizes = self.table.sizes(op, call, H200)
        self.tried.append(sizes)
        if sizes.get("tile") == 128:
            raise RuntimeError("out of registers")
        # More slots are always a little better, so that a second group has something to find.
        return self.seconds.get(sizes.get("decode_stages", 2), 1.0) - 0.001 * sizes.get("decode_slots", 0)


def test_search_keeps_the_quickest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = Table(tmp_path)
    table.put(H200, CALL, row(), "mosaic_decode")  # what was found before is no starting point
    clock = Clock(table, {2: 1.0, 3: 0.7, 4: 0.6, 6: 0.8})
    tune.tune("mosaic_decode", [CALL], H200, clock, table)
    assert clock.tried[0] == {}
    [found] = read_rows(H200, tmp_path)
    # On a CPU the rules have two slots and items of one tile.
    assert found.sizes == {"tile": 64, "decode_stages": 4, "decode_slots": 66, "min_tiles": 1}
    assert (found.microseconds, found.untuned_microseconds) == (pytest.approx(534000), pytest.approx(1e6))
    assert table.sizes("mosaic_decode", CALL, H200) == found.sizes
    # Tiles of 128 with six stages are more than a core's shared memory: not tried. One group after the other, each size once.
    tried = [(sizes["tile"], sizes["decode_stages"], sizes["decode_slots"], sizes["min_tiles"]) for sizes in clock.tried[1:]]
    assert tried[:5] == [(64, 3, 2, 1), (64, 4, 2, 1), (64, 6, 2, 1), (128, 2, 2, 1), (128, 3, 2, 1)]
    assert tried[5:] == [*((64, 4, slots, 1) for slots in (16, 33, 49, 66)), *((64, 4, 66, least) for least in (2, 4, 8))]
    out = capsys.readouterr().out
    assert "RuntimeError: out of registers" in out
    assert "1.87 times as quick as by rule" in out


def test_search_wants_a_real_gain(tmp_path: Path):
    table = Table(tmp_path)
    assert tune.search("mosaic_prefill", CALL, H200, lambda op, call: 1.0 - 0.019 * bool(table.rows(H200)), table) is None
    assert table.rows(H200) == []


def test_every_call_that_is_tuned_has_candidates():
    for call in tune.CALLS:
        for op in tuned.SIZES:
            names = [name for group in tune.choices(op, call) for name in group]
            assert sorted(names) == sorted(tuned.SIZES[op])
            config = launch_config(call)
            sizes = {name: getattr(config, name) for name in names}
            found = [list(tune.candidates(op, call, sizes, group)) for group in tune.choices(op, call)]
            # With heads of 256 a core's memory is full by rule.
            assert all(found) or (op, call.head_dim, found) == ("mosaic_prefill", 256, [[]])


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]):
    assert tune.main(["mosaic_decode"]) == 2
    error = capsys.readouterr().err
    assert "needs a Hopper GPU (compute capability 9)" in error
    assert "jax found cpu" in error


@pytest.mark.parametrize("op", ["mosaic_decode", "mosaic_prefill"])
@pytest.mark.slow
def test_measuring_in_the_interpreter(op: str, monkeypatch: pytest.MonkeyPatch):
    call = Call(2, 1, 64, 32, "bfloat16")
    assert tune.measure(op, call, (40,), (70,), num_layers=1, repeats=1) > 0
    monkeypatch.setattr(tune, "paged_attention", lambda q, *rest, implementation, **options: q * (implementation == "mosaic"))
    with pytest.raises(ArithmeticError, match="it differs from the reference by"):
        tune.measure(op, call, (40,), (70,), num_layers=1, repeats=1)
