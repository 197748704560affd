"""The policies there are, one module each: `recovery.policy` names a module, whose `build` makes the policy."""
