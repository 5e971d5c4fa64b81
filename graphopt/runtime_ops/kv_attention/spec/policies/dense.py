"""Each query reads all tokens that it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from graphopt.runtime_ops.kv_attention.spec.policies.policy import Policy

if TYPE_CHECKING:
    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes


@dataclass(frozen=True)
class Dense(Policy):
    """Attention that leaves nothing out."""

    name: ClassVar[str] = "dense"
    number: ClassVar[int] = 0
    has_kernel: ClassVar[bool] = True
    reads_all: ClassVar[bool] = True

    def tokens_read(self, attributes: KVAttributes, visible: int) -> int:
        """See :class:`Policy`."""
        del attributes
        return visible
