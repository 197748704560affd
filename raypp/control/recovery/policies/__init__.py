"""The policies, one module each: `recovery.policy` names a module, whose `build` returns the
policy."""
