"""RequestOutputCollector: what one stream has not read yet."""

import asyncio

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import RequestOutputKind


class RequestOutputCollector:
    """Holds at most one output of a request, however slow its reader is: a newer one is merged into one that waits.

    Under DELTA what is new is appended, else the newer output of a choice takes the place of the older. The n choices of a
    request do not touch each other. An error comes after what was there before it.

    Belongs to one event loop; `get` is for one reader.
    """

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._is_delta = output_kind is RequestOutputKind.DELTA
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        # For one reader a future does what an asyncio.Event does, with less work for every token.
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | Exception) -> None:
        """Add an output, or what ends the stream."""
        if isinstance(item, Exception):
            self._error = item
        elif self._output is None:
            self._output = item
        else:
            merge(self._output, item, self._is_delta)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def get_nowait(self) -> RequestOutput | None:
        """What waits; None if nothing does. Raises the error that was put."""
        output, self._output = self._output, None
        if output is None and self._error is not None:
            raise self._error
        return output

    async def get(self) -> RequestOutput:
        """The same, waiting for it."""
        while (output := self.get_nowait()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return output


def merge(output: RequestOutput, newer: RequestOutput, is_delta: bool) -> None:
    """Make `output` tell what it and `newer` tell. Both must be nobody else's."""
    output.finished = newer.finished
    output.metrics = newer.metrics
    output.num_cached_tokens = newer.num_cached_tokens
    if newer.prompt_logprobs is not None:
        output.prompt_logprobs = newer.prompt_logprobs
    places = {completion.index: place for place, completion in enumerate(output.outputs)}
    for completion in newer.outputs:
        place = places.get(completion.index)
        if place is None:
            output.outputs.append(completion)
        elif is_delta:
            _append(output.outputs[place], completion)
        else:
            output.outputs[place] = completion


def _append(completion: CompletionOutput, newer: CompletionOutput) -> None:
    completion.text += newer.text
    completion.token_ids += newer.token_ids
    if newer.logprobs is not None:
        assert completion.logprobs is not None
        completion.logprobs.extend(newer.logprobs)
    completion.cumulative_logprob = newer.cumulative_logprob
    completion.finish_reason = newer.finish_reason
    completion.stop_reason = newer.stop_reason
