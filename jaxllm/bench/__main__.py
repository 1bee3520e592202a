"""`python -m jaxllm.bench`."""

import sys

from jaxllm.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
