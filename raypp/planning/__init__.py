"""What follows from a job: places, cuts, schedules, memory, time, and the decision that is shipped.

Rooms above import it; it imports neither torch nor Ray.
"""
