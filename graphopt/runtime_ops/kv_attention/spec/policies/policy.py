"""What a policy of caches states: its parameters, which tokens a query reads, and what it must know of a page."""

# onnxscript's builder makes operators by name, so its values have no static type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from graphopt.graph.diagnostics import Fact
    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
    from graphopt.runtime_ops.kv_attention.spec.body_append import Call

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Value = int | float | str


@dataclass(frozen=True)
class Parameter:
    """A number or a word that a policy goes by: an attribute of the node, and an option of the step ``sparse_kv``.

    Attributes:
        name: of both.
        absent: the attribute where no head has the policy. Its type is that of the attribute.
        option: the default of the option; ``None``: the option may be left out, and then the attribute is ``absent``.
        least: the least number.
        most: the largest number; ``None`` for no limit.
        choices: the words that there are.
    """

    name: str
    absent: Value
    option: Value | None
    least: float = 0
    most: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: Any) -> None:
        """Raise ``ValueError`` where ``value`` is out of range; NaN is."""
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"KVAttention: {self.name} is one of {self.choices}, not {value!r}")
        elif self.most is None:
            if not value >= self.least:
                raise ValueError(f"KVAttention: {self.name} is at least {self.least}, not {value}")
        elif not self.least <= value <= self.most:
            raise ValueError(f"KVAttention: {self.name} is from {self.least} to {self.most}, not {value}")

    def attribute(self, option: Value | None) -> Value:
        """Return the attribute of the node that an option means."""
        return self.absent if option is None else type(self.absent)(option)


def parameter(absent: Value, *, option: Value | None = None, **limits: Any) -> Any:
    """Return the field of a policy that is a parameter; arguments are the attributes of :class:`Parameter`."""
    return dataclasses.field(default=absent, metadata={"option": option, "limits": limits})


@dataclass(frozen=True)
class Policy:
    """Which tokens the queries of a head read.

    A policy is one subclass in one file of this folder, a frozen dataclass. Its fields are its parameters, see
    :func:`parameter`; the section ``Attributes`` of its docstring describes them, also as options. Every query reads
    the first ``sinks`` and the newest ``recent`` tokens that it sees; a policy says what it reads besides.

    Attributes:
        name: what the step ``sparse_kv`` calls it.
        number: what the attribute ``policies`` calls it, and its place in ``GRAPHOPT_POLICIES`` of the kernels; never
            given to another one.
        has_kernel: whether it is one of ``GRAPHOPT_POLICIES``; else a model with such a head runs by bodies.
        reads_all: whether a query reads all tokens that it sees.
        may_drop: whether no query reads a token again once it is neither among the first nor among the newest, so that
            another one may take its place.
        in_blocks: whether queries of a block choose together what they leave out; all other queries read everything.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    has_kernel: ClassVar[bool] = False
    reads_all: ClassVar[bool] = False
    may_drop: ClassVar[bool] = False
    in_blocks: ClassVar[bool] = False

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        """Return the parameters in order."""
        return tuple(
            Parameter(field.name, cast("Value", field.default), field.metadata["option"], **field.metadata["limits"])
            for field in dataclasses.fields(cls)
        )

    @classmethod
    def described_parameters(cls) -> str:
        """Return what the docstring says of the parameters, line by line, as it stands under ``Attributes``."""
        return (inspect.getdoc(cls) or "").partition("Attributes:\n")[2] if dataclasses.fields(cls) else ""

    @classmethod
    def of(cls, attributes: KVAttributes) -> Self:
        """Return the policy with the parameters that a node says."""
        return cls(**{param.name: getattr(attributes, param.name) for param in cls.parameters()})

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Self:
        """Return the policy with the parameters that options of the step ``sparse_kv`` mean."""
        return cls(**{param.name: param.attribute(options[param.name]) for param in cls.parameters()})

    @property
    def chooses(self) -> bool:
        """Whether a query may read a page besides what every query reads."""
        return False

    def check(self) -> None:
        """Raise ``ValueError`` where parameters do not fit one another; called where a head has the policy."""

    def summary_floats(self, head_size: int) -> int:
        """Return the numbers that the policy must know of a page; 0 where it chooses by positions alone.

        Only one policy of a node may have such a summary.
        """
        del head_size
        return 0

    def update_summary(self, summary: Array, key: Array, offset: int) -> None:
        """Bring the summaries of a page up to date with one token, in place and in float32.

        Args:
            summary: float32 [Hk, Z], of the tokens in front of ``offset``; of any numbers where that is 0.
            key: float32 [Hk, D], of the token.
            offset: of the token in its page.
        """
        raise NotImplementedError

    def pages(self, attributes: KVAttributes, summaries: Array, queries: Doubles, position: int) -> Integers:
        """Return the pages of the sequence that queries at ``position`` read besides what every query reads, whole.

        Args:
            attributes: of the node.
            summaries: float32 [P, Z], of the head.
            queries: float64 [G, D], of the query heads that share the KV head.
            position: of the query.
        """
        del attributes, summaries, queries, position
        return np.zeros(0, np.int64)

    def write_summaries(
        self, call: Call, old: ir.Value, counts: ir.Value, tokens: ir.Value, is_new: ir.Value
    ) -> ir.Value:
        """Write the nodes that bring summaries up to date, and return them, float [B, n, H, Z].

        Args:
            call: the call.
            old: float [B, n, H, Z], of any numbers where a page had no token.
            counts: int64 [B, n], tokens of each page before the call, or more.
            tokens: float [B, n, H, T, D], keys.
            is_new: bool [B, n, 1, T, 1].
        """
        raise NotImplementedError

    def write_pages(
        self, call: Call, query: ir.Value, summaries: ir.Value, positions: ir.Value, reach: ir.Value
    ) -> ir.Value:
        """Write the nodes of :meth:`pages`, and return which pages queries read, bool [B, 1 or H, 1 or S, P].

        Args:
            call: the call.
            query: float [B, H, G, S, D].
            summaries: float [B, H, P, Z], after the call.
            positions: int64 [B, 1, S, 1], of the queries.
            reach: int64 [1] or [B, 1, S, 1], the tokens that a query sees because of the model's window.
        """
        raise NotImplementedError

    def block_mask(
        self, attributes: KVAttributes, weights: Doubles, visible: Mask, query_positions: Integers, positions: Integers
    ) -> Mask:
        """Return which tokens queries read that choose in blocks, bool [n, m].

        Args:
            attributes: of the node.
            weights: float64 [n, G, m], of dense attention; NaN where a query or a key that it sees is not finite.
            visible: bool [n, m].
            query_positions: int64 [n], one after the other.
            positions: int64 [m], of the tokens.
        """
        raise NotImplementedError

    def write_block_mask(
        self, call: Call, weights: ir.Value, visible: ir.Value, positions: ir.Value, token_positions: ir.Value
    ) -> ir.Value:
        """Write the nodes of :meth:`block_mask`, and return which tokens queries read, bool [B, H, S, N].

        Args:
            call: the call.
            weights: float [B, H, G, S, N], of dense attention, NaN as there.
            visible: bool [B, 1, S, N].
            positions: int64 [B, 1, S, 1], of the queries; of a column without a token it is in front of the call.
            token_positions: int64 [B, 1, 1, N].
        """
        raise NotImplementedError

    def tokens_read(self, attributes: KVAttributes, visible: int) -> int:
        """Return about how many of ``visible`` tokens a query reads."""
        return min(visible, attributes.sinks + attributes.recent)

    def besides(self) -> Fact | None:
        """State which pages a query reads besides what every query reads, for reports."""
        return None


def candidate_pages(attributes: KVAttributes, position: int) -> Integers:
    """Return the pages with a token that the query at ``position`` sees and does not read in any case, in order."""
    first = max(attributes.sinks, int(attributes.first_seen(position)))
    last = position - attributes.recent
    return np.arange(first // attributes.page, last // attributes.page + 1) if first <= last else np.arange(0)


def write_candidates(call: Call, positions: ir.Value, reach: ir.Value) -> ir.Value:
    """Write the nodes of :func:`candidate_pages`; return bool [B, 1, S, P]. Arguments as of ``write_pages``."""
    op, attributes = call.op, call.attrs
    begin = op.Mul(call.range(call.pages), attributes.page)
    end = op.Add(begin, attributes.page - 1)
    lowest = op.Max(op.Max(begin, attributes.sinks), op.Add(op.Sub(positions, reach), 1))
    return op.LessOrEqual(lowest, op.Min(end, op.Sub(positions, attributes.recent)))
