"""The names of the recovery policies: each module of `raypp.recovery.policies` is one. None is imported."""

from __future__ import annotations

from raypp.registry import Registry

POLICIES = Registry("policy")
POLICIES.register_modules("raypp.recovery.policies", "build")
