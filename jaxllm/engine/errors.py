"""What goes wrong after a request was checked. Mistakes of the caller are ValueErrors."""

from collections.abc import Sequence

from jaxllm.core.types import EngineCoreRequest


class EngineDeadError(RuntimeError):
    """The engine core failed and cannot go on. In the process in which it happened `__cause__` says why."""


class EngineStartError(RuntimeError):
    """The engine core's process did not become ready."""


class FrontEndLostError(RuntimeError):
    """The front end that this machine's engine cores belong to is not there any more, and has not said that it would end."""


class RequestFailedError(RuntimeError):
    """The engine core gave up on one request; the others go on."""


class AdmissionError(RuntimeError):
    """There is no room for another request now. Nothing is wrong with it: it may be sent again later.

    Attributes:
        limit: the engine argument that sets the limit.
    """

    limit: str


class QueueOverflowError(AdmissionError):
    """There are `max_num_queued_reqs` unfinished requests."""

    limit = "max_num_queued_reqs"


class MaxQueuedTokensError(AdmissionError):
    """The prompts that wait for their first token have `max_num_queued_tokens` tokens."""

    limit = "max_num_queued_tokens"


class EngineLostError(EngineDeadError):
    """One of several engine cores has died, which takes its requests with it; the others go on.

    Attributes:
        engine_index: which.
        requests: those that had not ended there.
    """

    def __init__(self, message: str, engine_index: int, requests: Sequence[EngineCoreRequest] = ()) -> None:
        super().__init__(message)
        self.engine_index = engine_index
        self.requests = requests
