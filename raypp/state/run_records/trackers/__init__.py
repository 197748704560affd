"""The trackers, one module each: `observe.trackers` names a module, whose `open_tracker` opens
it."""
