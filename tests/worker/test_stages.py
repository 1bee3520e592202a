"""Which layers and which arrays of the KV cache a stage of a pipeline has."""

import pytest

from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.worker.kv_cache import num_blocks_in
from jaxllm.worker.stages import _own_arrays, split_layers


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(30, 1, [30]), (30, 2, [15, 15]), (32, 3, [11, 11, 10]), (7, 4, [2, 2, 2, 1]), (3, 3, [1, 1, 1])],
)
def test_layers(num_layers, num_stages, sizes):
    stages = split_layers(num_layers, num_stages)
    assert [len(layers) for layers in stages] == sizes
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))


@pytest.mark.parametrize("num_stages", [0, 4])
def test_too_many_stages(num_stages):
    with pytest.raises(ValueError, match=f"3 layers cannot be split over {num_stages} stages"):
        split_layers(3, num_stages)


def test_arrays_that_layers_of_other_stages_use_are_left_out():
    spec, sliding = KVCacheSpec(4, 2, 8, 4), KVCacheSpec(4, 2, 8, 4, sliding_window=16)
    # Layers 0 and 1 see everything, 2 to 5 slide: three groups that share two arrays.
    groups = (KVCacheGroup((0, 1), spec), KVCacheGroup((2, 3), sliding), KVCacheGroup((4, 5), sliding))
    config = KVCacheConfig(10, groups)
    places = config.array_of_layer()
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert _own_arrays(places[:3]) == ([(0, 0), (0, 1), (1, 0)], 2)
    assert _own_arrays(places[5:]) == ([(2, 0)], 1)
    # 2 planes x 2 heads x 4 tokens x 8 x 4 bytes a block of an array.
    assert num_blocks_in(512 * 100, config, 1, max_model_len=16) == 50
    assert num_blocks_in(512 * 100, config, 1, max_model_len=16, num_arrays=1) == 100
    assert num_blocks_in(512 * 100, config, 2, max_model_len=16, num_arrays=1) == 200
