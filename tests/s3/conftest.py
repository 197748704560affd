"""Makes the shared contract of stores importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "servers"))
