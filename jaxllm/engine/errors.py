"""What goes wrong after a request was checked. Mistakes of the caller are ValueErrors."""


class EngineDeadError(RuntimeError):
    """The engine core failed and cannot go on. In the process in which it happened `__cause__` says why."""


class EngineStartError(RuntimeError):
    """The engine core's process did not become ready."""


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
