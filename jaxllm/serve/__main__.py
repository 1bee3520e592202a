"""`python -m jaxllm.serve`."""

import sys

from jaxllm.serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
