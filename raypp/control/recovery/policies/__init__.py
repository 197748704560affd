"""The policies, one module each: `recovery.policy` names it, and its `build` returns the policy."""
