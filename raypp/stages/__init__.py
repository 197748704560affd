"""What the stages of a model compute, and what ranks send each other.

`state`, `rank` and `tools` import it; it never imports Ray.
"""
