"""Which implementation runs."""

import logging

import pytest

from kernels_pallas.dispatch import choose


def test_auto_takes_the_first_that_runs_here_and_says_so_once(caplog):
    available = {"fast": ("gpu",), "plain": (), "other": ()}
    with caplog.at_level(logging.INFO, logger="kernels_pallas.dispatch"):
        assert choose("test_operation", "auto", available) == "plain"
        assert choose("test_operation", "auto", available) == "plain"
    assert caplog.messages == ["test_operation: plain on cpu (fast runs on gpu)"]


def test_a_named_one_is_an_order():
    assert choose("test_operation", "other", {"plain": (), "other": ("cpu",)}) == "other"
    with pytest.raises(ValueError, match="'fast' of test_operation runs on gpu, tpu, not on cpu"):
        choose("test_operation", "fast", {"fast": ("gpu", "tpu"), "plain": ()})
    with pytest.raises(ValueError, match="one of auto, plain, got 'magic'"):
        choose("test_operation", "magic", {"plain": ()})


def test_nothing_that_runs_is_an_error():
    with pytest.raises(ValueError, match="no implementation of test_operation runs on cpu"):
        choose("test_operation", "auto", {"fast": ("gpu",)})
