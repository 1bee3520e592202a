"""`python -m jaxllm.plan`."""

import sys

from jaxllm.plan.cli import main

if __name__ == "__main__":
    sys.exit(main())
