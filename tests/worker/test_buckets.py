import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from padding_waste import padding_waste

from jaxllm.worker.buckets import FINE_MIXED_FROM, Bucket, Buckets, ladder


def test_a_ladder_ends_exactly():
    assert ladder(16, 100, fine_from=128, parts=4) == [16, 32, 64, 100]
    assert ladder(1, 8, fine_from=8, parts=2) == [1, 2, 4, 8]
    assert ladder(16, 8, fine_from=128, parts=4) == [8]
    assert ladder(1, 50, fine_from=8, parts=2) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 50]
    assert ladder(64, 600, fine_from=128, parts=4) == [64, 128, 160, 192, 224, 256, 320, 384, 448, 512, 600]


def test_last_buckets_are_the_limits():
    buckets = Buckets(max_num_seqs=24, max_num_batched_tokens=200)
    assert [b.num_rows for b in buckets.decode] == [1, 2, 4, 8, 12, 16, 24]
    assert [(b.num_tokens, b.num_rows) for b in buckets.mixed] == [
        (16, 16),
        (32, 24),
        (64, 24),
        (128, 24),
        (160, 24),
        (192, 24),
        (200, 24),
    ]
    assert next(iter(buckets)) == Bucket(200, 24, False)


def test_decode_rows_take_a_decode_bucket():
    buckets = Buckets(max_num_seqs=8, max_num_batched_tokens=64)
    assert buckets.choose(np.array([1, 1, 1])) == Bucket(4, 4, True)
    assert buckets.choose(np.array([2, 1])) == Bucket(16, 8, False)


def test_what_is_not_ready_is_passed_over():
    buckets = Buckets(max_num_seqs=8, max_num_batched_tokens=64)
    ready = {*buckets.largest, buckets.mixed[1]}
    assert [str(bucket) for bucket in ready - {buckets.mixed[1]}] in (["mixed 64", "decode 8"], ["decode 8", "mixed 64"])
    assert buckets.choose(np.array([1]), ready=ready) == Bucket(8, 8, True)
    assert buckets.choose(np.array([2]), ready=ready) == Bucket(32, 8, False)
    assert buckets.choose(np.array([33]), ready=ready) == Bucket(64, 8, False)


def test_least_tokens():
    buckets = Buckets(max_num_seqs=1, max_num_batched_tokens=16, least_tokens=2)
    assert buckets.choose(np.array([1])) == Bucket(2, 2, True)


@pytest.mark.parametrize("sizes", [[4, 2, 8], [1, 2], [1, 1, 8]])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="decode bucket sizes"):
        Buckets(8, 64, decode_sizes=sizes)
    with pytest.raises(ValueError, match="mixed bucket sizes"):
        Buckets(8, 64, mixed_sizes=sizes)


@given(st.integers(1, 300), st.integers(0, 3000), st.data())
def test_every_step_fits_its_bucket(max_num_seqs, extra, data):
    max_tokens = max_num_seqs + extra
    buckets = Buckets(max_num_seqs, max_tokens)
    rows = data.draw(st.integers(1, max_num_seqs))
    tokens = np.ones(rows, np.int64)
    tokens[0] += data.draw(st.integers(0, max_tokens - rows))
    bucket = buckets.choose(tokens)
    assert tokens.sum() <= bucket.num_tokens <= max_tokens
    assert rows <= bucket.num_rows <= max_num_seqs
    assert bucket.decode_only == (tokens.max() == 1)


def test_buckets_of_several_steps():
    buckets = Buckets(max_num_seqs=8, max_num_batched_tokens=16, num_decode_steps=4)
    assert [str(b) for b in buckets.multi_step] == ["decode 1 x 4", "decode 2 x 4", "decode 4 x 4", "decode 8 x 4"]
    assert buckets.choose_multi_step(3) == Bucket(4, 4, True, 4)
    assert set(buckets) == {*buckets.decode, *buckets.multi_step, *buckets.mixed}
    assert Buckets(8, 16).multi_step == []
    assert [str(b) for b in buckets.largest] == ["mixed 16", "decode 8", "decode 8 x 4"]
    assert len(buckets) == len(list(buckets))
    ready = {*buckets.largest, buckets.multi_step[1], *buckets.decode}
    assert [str(buckets.choose_multi_step(rows, ready)) for rows in (1, 2, 3)] == ["decode 2 x 4", "decode 2 x 4", "decode 8 x 4"]


LENGTHS = json.loads((Path(__file__).parents[1] / "data" / "sharegpt_like_lengths.json").read_text())["lengths"]


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "mixed_parts"), [(128, 512, 2), (256, 2048, 4), (1024, 8192, 4)]
)
def test_padding_wastes_less_than_twelve_percent(max_num_seqs, max_num_batched_tokens, mixed_parts):
    """On average over requests that all come at once, and Poisson arrivals from a few running at a time to very many."""
    buckets = Buckets(max_num_seqs, max_num_batched_tokens, mixed_parts=mixed_parts)
    limits = (max_num_seqs, max_num_batched_tokens)
    rng = np.random.default_rng(0)
    wasted = [padding_waste(LENGTHS[:64], [0.0] * 64, buckets, *limits), padding_waste(LENGTHS, [0.0] * 256, buckets, *limits)]
    for steps_between in (40, 10, 3):
        wasted.append(padding_waste(LENGTHS, np.cumsum(rng.exponential(steps_between, 256)), buckets, *limits))
    assert np.mean(wasted) < 0.12, wasted
    # The mere powers of two would not do.
    coarse = Buckets(*limits, 1, ladder(1, max_num_seqs, 1 << 30, 1), ladder(16, max_num_batched_tokens, 1 << 30, 1))
    rng = np.random.default_rng(0)
    assert padding_waste(LENGTHS, np.cumsum(rng.exponential(10, 256)), coarse, *limits) > 0.2
    assert len(buckets.mixed) < 4 * (max_num_batched_tokens // FINE_MIXED_FROM).bit_length() + 5
