"""Makes the shared contract of stores and the S3 server importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))
