"""What outlives a process: checkpoints, snapshots, Hugging Face files, the records of a run.

`rank` and the rooms above import it; it never imports Ray.
"""
