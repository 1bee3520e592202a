"""What a request gives back: RequestOutput, its CompletionOutputs, and log probabilities. Names are vLLM's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload


@dataclass(slots=True)
class Logprob:
    """The log probability of one token at one position.

    Attributes:
        rank: 1 is the most probable token of the vocabulary; None if it was not asked for by rank.
        decoded_token: the text of the token; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


@dataclass(slots=True)
class FlatLogprobs(Sequence[LogprobsOnePosition]):
    """A list of `dict[int, Logprob]`, kept as a few long lists: far fewer objects, dicts are made when asked for.

    Entries `start_indices[i]` to `end_indices[i]` of the other lists belong to position i. A position without log
    probabilities (the first of a prompt) reads as an empty dict.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, entries: Mapping[int, Logprob] | None) -> None:
        """Add a position."""
        entries = entries or {}
        self.append_lists(
            list(entries),
            [entry.logprob for entry in entries.values()],
            [entry.rank for entry in entries.values()],
            [entry.decoded_token for entry in entries.values()],
        )

    def append_lists(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Sequence[int | None],
        decoded_tokens: Sequence[str | None],
    ) -> None:
        """Add a position, given in parallel lists of distinct tokens."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[Mapping[int, Logprob] | None]) -> None:
        """Add positions."""
        if not isinstance(positions, FlatLogprobs):
            for entries in positions:
                self.append(entries)
            return
        for start, end in zip(positions.start_indices, positions.end_indices, strict=True):
            self.append_lists(
                positions.token_ids[start:end],
                positions.logprobs[start:end],
                positions.ranks[start:end],
                positions.decoded_tokens[start:end],
            )

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: int | slice) -> "LogprobsOnePosition | FlatLogprobs":
        if isinstance(index, slice):
            positions = FlatLogprobs()
            for start, end in zip(self.start_indices[index], self.end_indices[index], strict=True):
                positions.append_lists(
                    self.token_ids[start:end], self.logprobs[start:end], self.ranks[start:end], self.decoded_tokens[start:end]
                )
            return positions
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __iter__(self) -> Iterator[LogprobsOnePosition]:
        return (self[i] for i in range(len(self)))


SampleLogprobs = list[LogprobsOnePosition] | FlatLogprobs
PromptLogprobs = list[LogprobsOnePosition | None] | FlatLogprobs


@dataclass(slots=True)
class RequestStateStats:
    """Times of one request, in seconds.

    `arrival_time` is `time.time()` of the front end and `first_token_latency` a difference to it. The `_ts` times are
    `time.monotonic()` of the engine core: only differences between them mean something. 0.0: has not happened.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        index: which of the request's `n`.
        text, token_ids: all of it, or what is new since the last one under RequestOutputKind.DELTA.
        cumulative_logprob: sum of the log probabilities of all tokens so far; None if none were asked for.
        logprobs: one entry for each of `token_ids`.
        finish_reason: "stop", "length", "abort", "error" or "repetition"; None while it goes on.
        stop_reason: the stop string or the stop token id that ended it; None for EOS and all other reasons.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The outputs of a request.

    Attributes:
        request_id: as the caller gave it.
        prompt: its text; None if it came as token ids.
        prompt_logprobs: one entry for each prompt token, None for the first; None if they were not asked for.
        finished: whether all of the request's `n` outputs are.
        metrics: times of the output that this object tells about; None if the engine keeps no statistics.
        num_cached_tokens: prompt tokens found in the prefix cache when the request was first scheduled.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    num_cached_tokens: int = 0
