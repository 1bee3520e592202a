"""The toy engine is that of the engine's tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))
