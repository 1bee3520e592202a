"""What a model writes to what a client gets: reasoning, content, tool calls.

A parser takes the text as it comes and gives pieces. How the text is cut must not matter, so a whole answer is parsed by the same
code, in one go, and streamed answers equal the others.
"""

from jaxllm.serve.parsers.output import OutputParser
from jaxllm.serve.parsers.pieces import Piece
from jaxllm.serve.parsers.reasoning import REASONING_PARSERS
from jaxllm.serve.parsers.tools import TOOL_PARSERS

__all__ = ["REASONING_PARSERS", "TOOL_PARSERS", "OutputParser", "Piece"]
