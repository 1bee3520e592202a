"""Log probabilities of prompt tokens, computed beside the step from the hidden states that it gives back.

Few requests ask for them, so the step itself does not carry their cost: hidden states come to the host, and go through the
output head again in chunks of a fixed size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.core.output import LogprobsLists, NewRequestData, SchedulerOutput
from jaxllm.models.graph import ModelGraph
from jaxllm.sample.limits import MAX_LOGPROB_TOKEN_IDS
from jaxllm.sample.logprobs import concatenate, prompt_logprobs, to_lists
from jaxllm.sampling_params import SamplingParams
from jaxllm.worker.input_batch import InputBatch
from jaxllm.worker.processes import replicate

CHUNK = 64

# Of a prompt of one token, which nothing predicts.
_NOTHING = LogprobsLists(np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32), np.zeros(0, np.int32))


@dataclass(frozen=True)
class PromptChunk:
    """A part of a prompt in one step.

    Attributes:
        first: its first token in the batch.
        targets: int32 [n], the prompt tokens that its first n tokens predict.
        parts: where its request gathers log probabilities. A request that is preempted and starts anew gathers elsewhere.
        is_last: whether the prompt ends with it.
        weights: that the step ran with.
    """

    req_id: str
    first: int
    targets: np.ndarray
    params: SamplingParams
    parts: list[LogprobsLists]
    is_last: bool
    weights: tuple[jax.Array, ...]


class PromptLogprobs:
    """Those requests that ask for log probabilities of their prompt and are still in their prefill.

    Args:
        wait_for_steps: waits until the devices have nothing to do. Devices of several processes need it: on a CPU a program runs
            beside those before it, and what the two exchange would be mixed up.
    """

    def __init__(
        self,
        graph: ModelGraph,
        model: ModelConfig,
        replicated: jax.sharding.Sharding,
        wait_for_steps: Callable[[], object],
    ) -> None:
        self._model, self._replicated, self._wait_for_steps = model, replicated, wait_for_steps
        self._parts: dict[str, list[LogprobsLists]] = {}

        def compute(weights: tuple[jax.Array, ...], hidden: jax.Array, targets: jax.Array, extra_ids: jax.Array):
            logits = graph.bind(weights).compute_logits(hidden)
            num_best = model.decoder.vocab_size if model.max_logprobs == -1 else model.max_logprobs
            return prompt_logprobs(logits, targets, num_best, model.logprobs_mode, extra_ids)

        self._compute = jax.jit(compute, out_shardings=replicated)

    def add(self, request: NewRequestData) -> None:
        """A new request; one resumed with outputs has delivered its prompt's log probabilities before."""
        asks = request.sampling_params.num_prompt_logprobs is not None
        if asks and len(request.token_ids) == request.num_prompt_tokens:
            assert request.num_computed_tokens == 0, "a prompt with log probabilities must be computed whole"
            self._parts[request.req_id] = []

    def remove(self, req_id: str) -> None:
        self._parts.pop(req_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._parts.clear()

    def chunks(
        self,
        weights: tuple[jax.Array, ...],
        batch: InputBatch,
        scheduler_output: SchedulerOutput,
        req_ids: Sequence[str],
        counts: np.ndarray,
    ) -> list[PromptChunk]:
        """The parts of prompts in a step, in batch order, that need its hidden states."""
        if not self._parts or self._parts.keys().isdisjoint(req_ids):
            return []
        stops = np.cumsum(counts)
        computed = batch.num_computed(scheduler_output, req_ids)
        chunks = []
        for row, req_id in enumerate(req_ids):
            if req_id not in self._parts:
                continue
            # The token at position p + 1 is what the hidden state at p predicts.
            start, count = int(computed[row]), int(counts[row])
            targets = batch.prompt_chunk(req_id, start + 1, start + count + 1)
            is_last = start + count >= batch.num_prompt_tokens(req_id)
            parts = self._parts.pop(req_id) if is_last else self._parts[req_id]
            first = int(stops[row]) - count
            chunks.append(PromptChunk(req_id, first, targets, batch.sampling_params[req_id], parts, is_last, weights))
        return chunks

    def collect(self, chunks: Sequence[PromptChunk], hidden: jax.Array) -> dict[str, LogprobsLists]:
        """Compute what the parts give; returns the requests whose prompt is complete.

        Args:
            hidden: [T, M], of their step.
        """
        host_hidden = np.asarray(hidden)
        if not self._replicated.is_fully_addressable:
            self._wait_for_steps()
        done = {}
        for chunk in chunks:
            rows = host_hidden[chunk.first : chunk.first + len(chunk.targets)]
            chunk.parts.extend(self._logprobs(chunk.weights, rows, chunk.targets, chunk.params))
            if chunk.is_last:
                done[chunk.req_id] = concatenate(chunk.parts) if chunk.parts else _NOTHING
        return done

    def warm_up(self, weights: tuple[jax.Array, ...]) -> None:
        """Compile. Without requests that ask, nothing else is run."""
        hidden = np.zeros((1, self._model.decoder.hidden_size), jnp.dtype(self._model.dtype))
        self._logprobs(weights, hidden, np.zeros(1, np.int32), SamplingParams(prompt_logprobs=0))

    def _logprobs(
        self, weights: tuple[jax.Array, ...], hidden: np.ndarray, targets: np.ndarray, params: SamplingParams
    ) -> list[LogprobsLists]:
        """hidden [n, M], targets int32 [n] -> log probabilities of n positions."""
        named = params.prompt_logprob_token_ids
        extra_ids = np.zeros(MAX_LOGPROB_TOKEN_IDS, np.int32)
        extra_ids[: len(named or ())] = named or ()
        parts = []
        for start in range(0, len(targets), CHUNK):
            size = min(CHUNK, len(targets) - start)
            chunk = np.zeros((CHUNK, hidden.shape[1]), hidden.dtype)
            chunk[:size] = hidden[start : start + size]
            chunk_targets = np.zeros(CHUNK, np.int32)
            chunk_targets[:size] = targets[start : start + size]
            inputs = [replicate(array, self._replicated) for array in (chunk, chunk_targets, extra_ids)]
            arrays = self._compute(weights, *inputs)
            count = params.num_prompt_logprobs
            assert count is not None
            parts.append(to_lists(jax.tree.map(np.asarray, arrays), slice(0, size), count, named))
        return parts
