"""n > 1: one request becomes n requests, whose outputs come together again."""

import copy
import dataclasses

from jaxllm.core.types import EngineCoreRequest
from jaxllm.outputs import CompletionOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


class ParentRequest:
    """A request with n > 1.

    Attributes:
        request_id: internal; child i is called `f"{i}_{request_id}"`.
        unfinished: internal ids of the children that are queued and have not ended; kept by the output processor.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.params: SamplingParams = request.sampling_params
        self.unfinished: set[str] = set()
        self.max_num_generation_tokens = 0
        self._outputs: list[CompletionOutput] = []

    def make_children(self, request: EngineCoreRequest) -> list[EngineCoreRequest]:
        """The n requests. They differ in id and, if the request has a seed, in seed: `seed + index`."""
        return [
            dataclasses.replace(request, request_id=f"{index}_{self.request_id}", sampling_params=self._child_params(index))
            for index in range(self.params.n)
        ]

    def _child_params(self, index: int) -> SamplingParams:
        params = copy.copy(self.params)
        params.n = 1
        if params.seed is not None:
            params.seed += index
            if params.seed >= 2**64:
                params.seed -= 2**64
        return params

    def add_output(self, child_id: str, output: CompletionOutput) -> list[CompletionOutput]:
        """Take a child's output.

        Returns:
            What to send now: streams get each output as it comes, FINAL_ONLY all n in order of their index when all are there.
        """
        if output.finished():
            self.unfinished.discard(child_id)
        if self.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            return [output]
        self._outputs.append(output)
        return [] if self.unfinished else sorted(self._outputs, key=lambda output: output.index)
