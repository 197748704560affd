"""The trackers, one module each: `observe.trackers` names it, and its `open_tracker` opens it."""
