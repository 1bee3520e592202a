"""What goes wrong after a request was accepted. Mistakes of the caller are ValueErrors."""


class EngineDeadError(RuntimeError):
    """The engine core failed in a step and cannot go on; `__cause__` says why, in the process in which it happened."""


class RequestFailedError(RuntimeError):
    """The engine core gave up on one request; the others go on."""


class QueueOverflowError(RuntimeError):
    """Refused: max_num_queued_reqs requests are unfinished already."""


class MaxQueuedTokensError(RuntimeError):
    """Refused: max_num_queued_tokens prompt tokens are waiting for their first token already."""
