"""A small engine for tests: a byte-level tokenizer, and an executor whose model is a hash of the context.

The executor is a real one in all but the mathematics: it keeps tokens in blocks, reads each request's context back through its
block table, and checks every number that the scheduler hands it. So a wrong block, a lost token or a false prefix hit changes
the output, which `expected_tokens` gives without any engine.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.config import CacheConfig, DecoderConfig, EngineConfig, ModelConfig, RopeConfig, SchedulerConfig
from jaxllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroup, KVCacheSpec
from jaxllm.core.output import LogprobsLists, ModelRunnerOutput, NewRequestData, SchedulerOutput
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.executor.abstract import Executor
from jaxllm.parallel_config import ParallelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

EOS, IM_START, IM_END = 0, 1, 2
VOCAB_SIZE = 320
BLOCK_SIZE = 4
NextToken = Callable[[tuple[int, ...]], int]

_TEXT = ["Hello world, the quick brown fox stops here. A name, another name, and the end of the story. hello hello STOP now"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_backend_tokenizer() -> "Tokenizer":
    """256 bytes, three special tokens and some words; the last ids of the model's vocabulary have no text."""
    # Here, so that an engine core's process, which imports this module for the executor, starts quickly.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 5,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """The same, as a front end has it."""
    from transformers import PreTrainedTokenizerFast

    backend = make_backend_tokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=_TEMPLATE)


def make_config(
    *,
    max_model_len: int = 64,
    num_blocks: int = 129,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    policy: Any = "fcfs",
    prefix_caching: bool = True,
    eos_token_ids: tuple[int, ...] = (EOS, IM_END),
    log_stats: bool = True,
    stream_interval: int = 1,
    max_num_queued_reqs: int | None = None,
    max_num_queued_tokens: int | None = None,
    async_scheduling: bool = False,
    num_decode_steps: int = 1,
    max_itl: float | None = None,
    num_stages: int = 1,
    data_parallel_size: int = 1,
    data_parallel_restart: bool = False,
    data_parallel_routing: Any = "load",
    data_parallel_start_rank: int = 0,
    data_parallel_backend: Any = "mp",
    **model: Any,
) -> EngineConfig:
    """Synchronous scheduling unless asked otherwise, since many tests count steps."""
    decoder = DecoderConfig("LlamaForCausalLM", VOCAB_SIZE, 8, 8, num_stages, 2, 1, 4, max_model_len, 1e-5, RopeConfig())
    scheduler = SchedulerConfig(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        policy,
        async_scheduling=async_scheduling,
        num_pipeline_stages=num_stages,
        num_decode_steps=num_decode_steps,
        max_itl=max_itl,
    )
    return EngineConfig(
        model=ModelConfig("toy", "toy", decoder, "float32", max_model_len, eos_token_ids=eos_token_ids, **model),
        cache=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching, num_gpu_blocks_override=num_blocks),
        scheduler=scheduler,
        parallel=ParallelConfig(
            pipeline_parallel_size=num_stages,
            data_parallel_size=data_parallel_size,
            data_parallel_restart=data_parallel_restart,
            data_parallel_routing=data_parallel_routing,
            data_parallel_backend=data_parallel_backend,
            data_parallel_start_rank=data_parallel_start_rank,
        ),
        log_stats=log_stats,
        stream_interval=stream_interval,
        max_num_queued_reqs=max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
    )


def hash_next(context: tuple[int, ...]) -> int:
    """The toy model: any token but the special ones and those without text."""
    return 3 + zlib.crc32(np.asarray(context, np.int32).tobytes()) % (VOCAB_SIZE - 8)


def scripted(scripts: Mapping[tuple[int, ...], Sequence[int]]) -> NextToken:
    """A model that answers these prompts with these tokens, and all else by hash."""

    def next_token(context: tuple[int, ...]) -> int:
        for prompt, answer in scripts.items():
            if context[: len(prompt)] == prompt and len(context) - len(prompt) < len(answer):
                return answer[len(context) - len(prompt)]
        return hash_next(context)

    return next_token


def expected_tokens(prompt: Sequence[int], num_tokens: int, next_token: NextToken = hash_next) -> list[int]:
    """What the model says, without an engine."""
    context = tuple(prompt)
    while len(context) < len(prompt) + num_tokens:
        context += (next_token(context),)
    return list(context[len(prompt) :])


def toy_logprobs(context: tuple[int, ...], token_id: int, num_logprobs: int) -> tuple[list[int], list[float], int]:
    """(token ids, log probabilities, rank of `token_id`): the most probable tokens follow the model's choice."""
    first = hash_next(context)
    count = VOCAB_SIZE if num_logprobs == -1 else num_logprobs
    ranked = [(first + i) % VOCAB_SIZE for i in range(count)]
    rank = (token_id - first) % VOCAB_SIZE + 1
    return [token_id, *ranked], [-0.5 * rank, *(-0.5 * (i + 1) for i in range(count))], rank


def lists_of(rows: list[tuple[list[int], list[float], int]]) -> LogprobsLists:
    """Rows of different width are filled up, as a worker's are."""
    width = max(len(row[0]) for row in rows)
    ids = np.full((len(rows), width), -1, np.int32)
    logprobs = np.full((len(rows), width), np.nan, np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row[0])], logprobs[i, : len(row[1])] = row[0], row[1]
    return LogprobsLists(ids, logprobs, np.asarray([row[2] for row in rows], np.int32))


class _Row:
    def __init__(self, request: NewRequestData) -> None:
        self.params = request.sampling_params
        self.token_ids = list(request.token_ids)
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_computed_tokens = request.num_computed_tokens
        self.block_ids = list(request.block_ids[0])
        self.end_token_ids = request.end_token_ids
        self.ended = False
        self.prompt_logprobs: list[tuple[list[int], list[float], int]] = []


class ToyExecutor(Executor):
    next_token: NextToken = staticmethod(hash_next)

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.num_shutdowns = 0
        self.asleep: set[str] = set()
        self.sleep_level = 0
        self.rows: dict[str, _Row] = {}
        self.during_step: Callable[[SchedulerOutput], None] | None = None

    def initialize(self) -> KVCacheConfig:
        num_blocks = self.config.cache.num_gpu_blocks_override
        assert num_blocks is not None
        self.blocks = np.full((num_blocks, BLOCK_SIZE), -1, np.int64)
        return KVCacheConfig(num_blocks, (KVCacheGroup((0,), KVCacheSpec(BLOCK_SIZE, 1, 4, 4)),))

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        assert self.num_shutdowns == 0
        assert not self.asleep
        if self.during_step is not None:
            self.during_step(scheduler_output)
        for req_id in scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids:
            self.rows.pop(req_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            assert request.req_id not in self.rows
            self.rows[request.req_id] = _Row(request)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            row = self.rows[req_id]
            assert row.num_computed_tokens == computed or row.ended
            row.block_ids += blocks[0] if blocks is not None else []
        scheduled = scheduler_output.num_scheduled_tokens
        assert sum(scheduled.values()) == scheduler_output.total_num_scheduled_tokens
        assert len(scheduled) <= len(self.rows) <= self.config.scheduler.max_num_seqs
        if scheduler_output.num_decode_steps > 1:
            assert not scheduler_output.scheduled_new_reqs
            assert max(scheduled.values()) == scheduler_output.num_decode_steps <= self.config.scheduler.num_decode_steps
            return self._run_steps(scheduled)
        assert sum(scheduled.values()) <= self.config.scheduler.max_num_batched_tokens
        return self._run(scheduled)

    def _run_steps(self, scheduled: Mapping[str, int]) -> ModelRunnerOutput:
        """One token after the other, until a request has as many as it may or one that ends it."""
        for req_id, count in scheduled.items():
            row = self.rows[req_id]
            assert not row.params.stop
            # Room for all of them was made beforehand.
            assert row.ended or len(row.block_ids) == -(-(row.num_computed_tokens + count) // BLOCK_SIZE)
        left = {req_id: count for req_id, count in scheduled.items() if not self.rows[req_id].ended}
        output = ModelRunnerOutput(list(scheduled), {req_id: i for i, req_id in enumerate(scheduled)}, [[] for _ in scheduled])
        logprobs: dict[str, list[LogprobsLists]] = {}
        while left:
            step = self._run(dict.fromkeys(left, 1))
            for req_id in list(left):
                (token_id,) = step.sampled_token_ids[step.req_id_to_index[req_id]]
                output.sampled_token_ids[output.req_id_to_index[req_id]].append(token_id)
                if req_id in step.logprobs_start and step.logprobs is not None:
                    start = step.logprobs_start[req_id]
                    logprobs.setdefault(req_id, []).append(step.logprobs.slice(start, start + 1))
                left[req_id] -= 1
                self.rows[req_id].ended = token_id in self.rows[req_id].end_token_ids
                if not left[req_id] or self.rows[req_id].ended:
                    del left[req_id]
        if logprobs:
            width = max(part.token_ids.shape[1] for parts in logprobs.values() for part in parts)
            assert all(part.token_ids.shape[1] == width for parts in logprobs.values() for part in parts)
            for req_id, parts in logprobs.items():
                output.logprobs_start[req_id] = sum(len(logprobs[other]) for other in output.logprobs_start)
                assert parts
            every = [part for parts in logprobs.values() for part in parts]
            output.logprobs = LogprobsLists(*(np.concatenate(columns) for columns in zip(*every, strict=True)))
        return output

    def _run(self, scheduled: Mapping[str, int]) -> ModelRunnerOutput:
        req_ids = list(reversed(scheduled))  # rows in another order than the scheduler's
        output = ModelRunnerOutput(req_ids, {req_id: i for i, req_id in enumerate(req_ids)})
        logprobs = []
        for req_id in req_ids:
            self._write_blocks(self.rows[req_id], scheduled[req_id])
        for req_id in req_ids:
            row = self.rows[req_id]
            start, end = row.num_computed_tokens, row.num_computed_tokens + scheduled[req_id]
            assert end <= len(row.token_ids)
            assert len(set(row.block_ids)) == len(row.block_ids) >= -(-end // BLOCK_SIZE)
            assert self.config.scheduler.num_decode_steps > 1 or len(row.block_ids) == -(-end // BLOCK_SIZE)
            assert 0 not in row.block_ids
            row.num_computed_tokens = end
            context = tuple(self.blocks[row.block_ids].reshape(-1)[:end].tolist())
            assert list(context) == row.token_ids[:end]
            self._prompt_logprobs(row, req_id, start, end, output)
            if end < len(row.token_ids):
                output.sampled_token_ids.append([])
                continue
            token_id = self.next_token(context)
            row.token_ids.append(token_id)
            output.sampled_token_ids.append([token_id])
            if row.params.num_logprobs is not None:
                output.logprobs_start[req_id] = len(logprobs)
                logprobs.append(self._logprobs(context, token_id, row.params.num_logprobs, row.params.logprob_token_ids))
        output.logprobs = lists_of(logprobs) if logprobs else None
        return output

    def _write_blocks(self, row: _Row, num_tokens: int) -> None:
        """Before any row reads: a request may hit a block that another one fills in the same step."""
        for position in range(row.num_computed_tokens, row.num_computed_tokens + num_tokens):
            self.blocks[row.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE] = row.token_ids[position]

    def _prompt_logprobs(self, row: _Row, req_id: str, start: int, end: int, output: ModelRunnerOutput) -> None:
        num_logprobs = row.params.num_prompt_logprobs
        if num_logprobs is None:
            return
        for position in range(max(start, 0) + 1, min(end, row.num_prompt_tokens - 1) + 1):
            context = tuple(row.token_ids[:position])
            row.prompt_logprobs.append(
                self._logprobs(context, row.token_ids[position], num_logprobs, row.params.prompt_logprob_token_ids)
            )
        if start < row.num_prompt_tokens <= end:
            nothing = LogprobsLists(np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32), np.zeros(0, np.int32))
            output.prompt_logprobs[req_id] = lists_of(row.prompt_logprobs) if row.prompt_logprobs else nothing

    @staticmethod
    def _logprobs(context: tuple[int, ...], token_id: int, count: int, ids: list[int] | None) -> Any:
        if ids is None:
            return toy_logprobs(context, token_id, count)
        _, _, rank = toy_logprobs(context, token_id, 0)
        values = [toy_logprobs(context, one, 0)[1][0] for one in [token_id, *ids]]
        return [token_id, *ids], values, rank

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        return [getattr(self, method)(*args, **(kwargs or {}), timeout=timeout)]

    def describe(self, name: str, *, timeout: float | None) -> tuple[str, int, float | None]:
        """For collective_rpc."""
        return name, len(self.rows), timeout

    def sleep(self, level: int, *, timeout: float | None) -> None:
        """Forget everything, as a worker does."""
        assert timeout is None
        self.asleep, self.sleep_level = {"weights", "kv_cache"}, level
        self.rows = {}
        self.blocks[:] = -1

    def wake_up(self, tags: Sequence[str], *, timeout: float | None) -> None:
        assert timeout is None
        self.asleep -= set(tags)

    def shutdown(self) -> None:
        self.num_shutdowns += 1


def make_engine(config: EngineConfig | None = None, *, tokenizer: Any = None, next_token: NextToken = hash_next) -> LLMEngine:
    executor_class = type("Executor", (ToyExecutor,), {"next_token": staticmethod(next_token)})
    return LLMEngine(config or make_config(), tokenizer, executor_class)


def executor_of(engine: LLMEngine) -> ToyExecutor:
    return engine.engine_core.engine_core.executor  # type: ignore[attr-defined]


def scheduler_of(engine: LLMEngine) -> Any:
    return engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def run(engine: LLMEngine) -> list[Any]:
    """All outputs until no request is left."""
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def check_idle(engine: LLMEngine) -> None:
    """Nothing is queued, running or remembered anywhere."""
    assert not engine.has_unfinished_requests()
    processor = engine.output_processor
    assert (processor.request_states, processor.parents, processor.internal_ids) == ({}, {}, {})
    scheduler = scheduler_of(engine)
    assert not scheduler.has_unfinished_requests()
    engine.step()  # tells the executor what has ended
    assert executor_of(engine).rows == {}
    assert engine.reset_prefix_cache()  # so no block is in use
