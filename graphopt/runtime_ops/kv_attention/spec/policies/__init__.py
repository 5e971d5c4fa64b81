"""Policies of caches: one file, one policy; a new file is all that the Python side of a new policy takes."""

from graphopt.runtime_ops.kv_attention.spec.policies.policy import Parameter, Policy, parameter
from graphopt.util.registry import Registry

POLICIES: Registry[type[Policy]] = Registry(
    __name__,
    kind="policy",
    name_of=lambda member: (
        getattr(member, "name", None) if isinstance(member, type) and issubclass(member, Policy) else None
    ),
    order=lambda policies: dict(sorted(policies.items(), key=lambda entry: entry[1].number)),
)
"""Every policy by the name that recipes call it, in the order of their numbers."""


def policy_numbered(number: int) -> type[Policy]:
    """Return the policy that the attribute ``policies`` calls ``number``.

    Raises:
        ValueError: there is none.
    """
    for policy in POLICIES.values():
        if policy.number == number:
            return policy
    names = ", ".join(f"{policy.number} ({name})" for name, policy in POLICIES.items())
    raise ValueError(f"there is no policy {number}, known are {names}")


__all__ = ["POLICIES", "Parameter", "Policy", "parameter", "policy_numbered"]
