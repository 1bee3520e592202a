import jax
import numpy as np

from jaxllm.core.output import CachedRequestData, NewRequestData, SchedulerOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker.batch import BatchLayout
from jaxllm.worker.buckets import Bucket
from jaxllm.worker.input_batch import InputBatch

BLOCK_SIZE, MAX_ROWS, MAX_BLOCKS = 4, 6, 5
MIXED = BatchLayout(Bucket(16, 4, False), BLOCK_SIZE, MAX_ROWS, 1, MAX_BLOCKS)
DECODE = BatchLayout(Bucket(4, 4, True), BLOCK_SIZE, MAX_ROWS, 1, MAX_BLOCKS)


def new(req_id: str, token_ids: list[int], blocks: list[int], computed: int = 0, num_prompt: int | None = None) -> NewRequestData:
    num_prompt = len(token_ids) if num_prompt is None else num_prompt
    return NewRequestData(req_id, token_ids, num_prompt, SamplingParams(), (blocks,), computed)


def step(new_reqs=(), cached=None, **counts: int) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=list(new_reqs),
        scheduled_cached_reqs=cached or CachedRequestData(),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )


def pack(batch: InputBatch, layout: BatchLayout, output: SchedulerOutput):
    req_ids, counts = batch.order(output)
    vector, sampled = batch.pack(layout, output, req_ids, counts)
    unpacked = jax.tree.map(np.asarray, vars(layout.unpack(jax.numpy.asarray(vector))))
    return req_ids, unpacked, sampled.tolist()


def test_prefill_beside_decode():
    batch = InputBatch(MAX_ROWS, 1, MAX_BLOCKS)
    a = batch.add(new("a", [10, 11, 12], [1]))
    pack(batch, MIXED, step([], CachedRequestData(["a"], [None], [0], [0]), a=3))
    b = batch.add(new("b", [20, 21, 22, 23, 24, 25, 26], [2, 3]))
    # a decodes its second output (position 4, in a new block); b computes 5 of its 7 prompt tokens.
    output = step([new("b", [20, 21, 22, 23, 24, 25, 26], [2, 3])], CachedRequestData(["a"], [([4],)], [4], [2]), b=5, a=1)
    req_ids, fields, sampled = pack(batch, MIXED, output)
    assert req_ids == ["a", "b"]
    assert sampled == [True, False]
    assert (fields["num_rows"], fields["num_decodes"]) == (2, 1)
    assert fields["rows"].tolist() == [a, b, MAX_ROWS, MAX_ROWS]
    assert fields["sampled_rows"].tolist() == [a, MAX_ROWS, MAX_ROWS, MAX_ROWS]
    assert fields["seq_lens"].tolist() == [5, 5, 0, 0]
    assert fields["query_start_loc"].tolist() == [0, 1, 6, 6, 6]
    assert fields["token_ids"].tolist() == [0, 20, 21, 22, 23, 24] + [0] * 10
    # a's token is the one it sampled last, which only the device knows.
    assert fields["last_token_index"].tolist() == [0, 16, 16, 16]
    nowhere = MAX_ROWS * MAX_BLOCKS
    assert fields["table_index"].tolist() == [a * MAX_BLOCKS + 1] + [nowhere] * (MIXED.num_table_updates - 1)
    assert fields["table_block"][0] == 4


def test_resumed_request_sends_its_outputs():
    batch = InputBatch(MAX_ROWS, 1, MAX_BLOCKS)
    batch.add(new("a", [10, 11, 12, 50, 51], [1, 2], num_prompt=3))
    output = step([new("a", [10, 11, 12, 50, 51], [1, 2], num_prompt=3)], a=5)
    _, fields, sampled = pack(batch, MIXED, output)
    assert fields["token_ids"][:5].tolist() == [10, 11, 12, 50, 51]
    assert fields["last_token_index"][0] == 16
    assert sampled == [True]


def test_last_prompt_token_alone_is_sent():
    """After a prefix hit one prompt token may be left: a row of a decode bucket whose token the host knows."""
    batch = InputBatch(MAX_ROWS, 1, MAX_BLOCKS)
    batch.add(new("a", [10, 11, 12, 13, 14], [1, 2], computed=4))
    _, fields, sampled = pack(batch, DECODE, step([new("a", [10, 11, 12, 13, 14], [1, 2], computed=4)], a=1))
    assert fields["token_ids"][0] == 14
    assert fields["last_token_index"][0] == 4
    assert sampled == [True]


def test_rows_are_reused_and_keep_nothing():
    batch = InputBatch(2, 1, MAX_BLOCKS)
    assert batch.add(new("a", [1], [1])) == 0
    assert batch.add(new("b", [2], [2])) == 1
    batch.remove("a")
    batch.remove("never known")
    assert batch.add(new("c", [3, 4], [5])) == 0
    output = step([new("c", [3, 4], [5])], c=2)
    _, fields, _ = pack(batch, MIXED, output)
    assert fields["token_ids"][:2].tolist() == [3, 4]


def test_positions_and_slots():
    batch = InputBatch(MAX_ROWS, 1, MAX_BLOCKS)
    tables = np.zeros((1, MAX_ROWS, MAX_BLOCKS), np.int32)
    tables[0, batch.add(new("a", list(range(6)), [7, 9]))] = [7, 9, 0, 0, 0]
    tables[0, batch.add(new("b", list(range(3)), [3]))] = [3, 0, 0, 0, 0]
    output = step([], CachedRequestData(["a", "b"], [None, None], [2, 0], [0, 0]), a=4, b=3)
    req_ids, counts = batch.order(output)
    vector, _ = batch.pack(MIXED, output, req_ids, counts)

    @jax.jit
    def metadata(vector, tables):
        return MIXED.attention_metadata(MIXED.unpack(vector), tables)

    result = metadata(vector, tables)
    assert result.positions.tolist() == [2, 3, 4, 5, 0, 1, 2] + [0] * 9
    # Block 7 holds positions 0 to 3 of a, block 9 the next; padding goes nowhere.
    assert result.slot_mapping[0].tolist() == [30, 31, 36, 37, 12, 13, 14] + [-1] * 9
    assert result.block_tables[0, 0].tolist() == [7, 9, 0, 0, 0]
    assert result.seq_lens.tolist() == [6, 3, 0, 0]


def test_decode_positions():
    batch = InputBatch(MAX_ROWS, 1, MAX_BLOCKS)
    tables = np.zeros((1, MAX_ROWS, MAX_BLOCKS), np.int32)
    tables[0, batch.add(new("a", [1], [2]))] = [2, 4, 0, 0, 0]
    output = step([], CachedRequestData(["a"], [None], [5], [5]), a=1)
    req_ids, counts = batch.order(output)
    vector, _ = batch.pack(DECODE, output, req_ids, counts)
    result = DECODE.attention_metadata(DECODE.unpack(jax.numpy.asarray(vector)), tables)
    assert result.positions.tolist() == [5, 0, 0, 0]
    assert result.slot_mapping[0].tolist() == [17, -1, -1, -1]


def test_table_updates_of_two_groups():
    layout = BatchLayout(Bucket(16, 4, False), BLOCK_SIZE, MAX_ROWS, 2, MAX_BLOCKS)
    batch = InputBatch(MAX_ROWS, 2, MAX_BLOCKS)
    batch.add(NewRequestData("a", [1, 2], 2, SamplingParams(), ([1], [2]), 0))
    output = step([], CachedRequestData(["a"], [([3, 4], [5])], [2], [0]), a=9)
    _, fields, _ = pack(batch, layout, output)
    assert fields["table_index"][:3].tolist() == [1, 2, MAX_ROWS * MAX_BLOCKS + 1]
    assert fields["table_block"][:3].tolist() == [3, 4, 5]
    assert layout.num_table_updates == 2 * (16 // 4 + 4)


def test_who_asks_for_logprobs():
    batch = InputBatch(MAX_ROWS, 1, MAX_BLOCKS)
    for req_id, logprobs in (("a", None), ("b", 0), ("c", 2)):
        batch.add(NewRequestData(req_id, [1, 2], 2, SamplingParams(logprobs=logprobs), ([1],), 0))
    assert batch.asking == {"b", "c"}
    batch.remove("b")
    batch.remove("a")
    assert batch.asking == {"c"}


def test_computed_tokens_whatever_the_order():
    batch = InputBatch(MAX_ROWS, 1, MAX_BLOCKS)
    output = step([], CachedRequestData(["a", "b"], [None, None], [4, 9], [1, 1]), a=1, b=1)
    assert batch.num_computed(output, ["a", "b"]).tolist() == [4, 9]
    assert batch.num_computed(output, ["b", "a"]).tolist() == [9, 4]
    output.scheduled_new_reqs.append(new("c", [1, 2, 3], [3], computed=2))
    assert batch.num_computed(output, ["a", "c", "b"]).tolist() == [4, 2, 9]
