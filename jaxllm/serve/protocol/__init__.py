"""Bodies of requests (pydantic models, checked on arrival) and of responses (typed dicts, made token by token)."""
