"""Limits of a job's text and numbers. No real job comes near them. A number within its limit can be
wrong; but nothing done with it overflows, takes all memory or longer than seconds."""

FILE_BYTES = 256 << 10
"""Bytes of a job file."""
VALUES = 10_000
"""Values and keys of a job file, also along aliases."""
TEXT = 32_768
"""Characters of a Hugging Face document that a job keeps."""

LAYERS = 4096
RANKS = 131_072
"""Ranks of a mesh, and of each of its axes."""
STAGES = 1024
"""Stages of a pipeline."""
PROMPTS = 16
"""Prompts of `train.sample`."""
TRACKERS = 16
"""Trackers of `observe.trackers`."""
PROMPT = 4096
"""Characters of one of them."""
NEW_TOKENS = 1024
"""Tokens of a sample."""
ACTIONS = 131_072
"""Actions of a schedule's program: ranks · stages per rank · microbatches · 2."""
PHASES = 100
"""Phases of a mixture."""
EPOCHS = 10_000
"""Epochs of a run; their rows are counted."""
GROUPS = 32
"""Groups of parameters of an optimizer."""
EXPRESSION = 200
"""Characters of the regular expression of one."""
ROWS = 10**6
"""Rows of a microbatch."""
WIDTH = 10**9
"""Sizes of a model's parts, and lengths of sequences."""
COUNT = 10**12
"""Steps, documents, and other counts."""
OUTER_STEPS = 2000
"""Steps between two outer steps. A snapshot holds a report of each."""
SEED = 2**63 - 1
SECONDS = 10**9
RATE = 10**9
"""Rates in Gbit/s or Mbit/s."""
REAL = 1e30
"""Numbers that only scale others, such as a learning rate."""
