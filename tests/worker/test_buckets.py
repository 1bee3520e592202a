import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.worker.buckets import Bucket, Buckets, doubling


def test_doubling_ends_exactly():
    assert doubling(16, 100) == [16, 32, 64, 100]
    assert doubling(1, 8) == [1, 2, 4, 8]
    assert doubling(16, 8) == [8]


def test_last_buckets_are_the_limits():
    buckets = Buckets(max_num_seqs=24, max_num_batched_tokens=200)
    assert [b.num_rows for b in buckets.decode] == [1, 2, 4, 8, 16, 24]
    assert [(b.num_tokens, b.num_rows) for b in buckets.mixed] == [(16, 16), (32, 24), (64, 24), (128, 24), (200, 24)]
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
