"""The attributes of ``ai.graphopt::KVAttention``, and what follows from them: where pages lie, what the state takes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.policies import POLICIES, Policy, policy_numbered
from graphopt.runtime_ops.kv_attention.spec.policies.dense import Dense
from graphopt.runtime_ops.kv_attention.spec.policies.retrieval import Retrieval
from graphopt.runtime_ops.kv_attention.spec.policies.streaming import Streaming
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF, Storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.runtime_ops.kv_attention.spec.policies import Parameter

DENSE, STREAMING, RETRIEVAL = Dense.number, Streaming.number, Retrieval.number
"""The numbers of policies that have come first."""

PAGES = (16, 32, 64, 128)

STORAGES = tuple(STORAGE_OF)
"""The names of all storages."""

FLOATS = {name: parameter.dtype for name, parameter in STORAGE_OF.items() if parameter.levels is None}
"""The type of a storage of floats."""

LEVELS = {name: parameter.levels for name, parameter in STORAGE_OF.items() if parameter.levels is not None}
"""The largest code of a storage of integers."""

MOST_CHANNELS, MOST_OF_FLOATS, MOST_LATENT = 256, 512, 1280
"""Numbers of a head, at most; of one in pages of floats that no policy chooses; of a row of which values are a part."""

LANES = 16
"""Tokens or channels that stand side by side in a stored page; head sizes are multiples of it."""

_COUNTS = ("softcap", "window", "sink_pages", "recent_pages", "sinks")

_VERSION_1 = frozenset(("budget", "summary", "mass", "channels", "compensate"))
"""Parameters of policies that every node states."""

Dimension = int | str


T = TypeVar("T")


def first_seen(positions: npt.ArrayLike, window: int, chunks: int) -> npt.NDArray[np.int64]:
    """Return the first position that queries at these positions see of a window of tokens, 0 for none, or of chunks."""
    queries = np.asarray(positions, np.int64)
    if not window:
        return np.zeros_like(queries)
    return queries - queries % window if chunks else np.maximum(queries - window + 1, 0)


def _with_parameters(cls: type[T]) -> type[T]:
    """Give a class the fields for those parameters of policies that it does not state itself."""
    for policy in POLICIES.values():
        for parameter in policy.parameters():
            if parameter.name not in cls.__annotations__:
                cls.__annotations__[parameter.name] = type(parameter.absent)
                setattr(cls, parameter.name, parameter.absent)
    return cls


@dataclass(frozen=True)
@_with_parameters
class KVAttributes:
    """The attributes of a node; what they mean is in :mod:`graphopt.runtime_ops.kv_attention.spec.schema`.

    Every node states those that are listed here, but for a ``clip`` of 1, ``token_factors`` and ``key_feedback`` of 0,
    a ``value_storage`` like ``storage``, which is "", a ``value_clip`` like ``clip``, which is 0, and ``slopes`` that
    are none. A parameter of a later policy is a field too, which only nodes state that have a head of that policy.
    Floats are rounded to float32, as a node holds them.

    Raises:
        ValueError: an attribute is out of its range, or two do not fit one another.
    """

    kv_heads: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    page: int = 64
    storage: str = "float32"
    sink_pages: int = 0
    recent_pages: int = 0
    policies: tuple[int, ...] = (DENSE,)
    sinks: int = 0
    recent: int = 1
    budget: int = 0
    summary: str = "bounds"
    mass: float = 0.0
    channels: int = 0
    compensate: int = 0
    clip: float = 1.0
    value_clip: float = 0.0
    token_factors: int = 0
    value_size: int = 0
    value_storage: str = ""
    chunks: int = 0
    key_feedback: int = 0
    slopes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", tuple(self.policies))
        if self.value_storage == self.storage:
            object.__setattr__(self, "value_storage", "")
        parameters = [parameter for policy in POLICIES.values() for parameter in policy.parameters()]
        floats = [parameter.name for parameter in parameters if isinstance(parameter.absent, float)]
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused below, as infinite
            for name in ("scale", "softcap", "clip", "value_clip", *floats):
                object.__setattr__(self, name, float(np.float32(getattr(self, name))))
            if self.value_clip == self.clip:
                object.__setattr__(self, "value_clip", 0.0)
            object.__setattr__(self, "slopes", tuple(float(np.float32(slope)) for slope in self.slopes))
        self._check_ranges(parameters)
        self._check_storage()
        self._check_policies()

    def _check_ranges(self, parameters: list[Parameter]) -> None:
        limits = {**dict.fromkeys(("kv_heads", "recent"), 1), **dict.fromkeys(_COUNTS, 0)}
        for name, limit in limits.items():
            if not getattr(self, name) >= limit:
                raise ValueError(f"KVAttention: {name} is at least {limit}, not {getattr(self, name)}")
        for name, choices in (("page", PAGES), ("storage", STORAGES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"KVAttention: {name} is one of {choices}, not {getattr(self, name)!r}")
        for parameter in parameters:
            parameter.check(getattr(self, parameter.name))
        if not math.isfinite(self.scale) or not math.isfinite(self.softcap):
            raise ValueError(f"KVAttention: scale {self.scale} and softcap {self.softcap} must be finite")

    def _check_storage(self) -> None:
        if self.value_storage and (
            self.value_storage not in LEVELS or self.storage not in LEVELS or self.value_size != 0
        ):
            raise ValueError(
                f"KVAttention: keys and values are stored in different ways only where both are codes of their own, "
                f"{', '.join(LEVELS)}; they are {self.storage} and {self.value_storage!r}"
                + (f", and values are {self.value_size} channels of keys" if self.value_size else "")
            )
        if self.page % self.unit:
            raise ValueError(
                f"KVAttention: with {self.storage_name} a page has a multiple of {self.unit} tokens, not {self.page}"
            )
        for name, share in (("clip", self.clip), ("value_clip", self.share_of_values)):
            if not 0 < share <= 1 or (share < 1 and self.levels is None):
                raise ValueError(
                    f"KVAttention: {name} is a share above 0 and up to 1 of what numbers span, and 1 for floats; it is "
                    f"{share} for {self.storage}"
                )
        for name in ("token_factors", "key_feedback"):
            flag = getattr(self, name)
            if flag not in (0, 1) or (flag and self.levels is None):
                raise ValueError(f"KVAttention: {name} is 0 or 1, and 0 for floats; it is {flag} for {self.storage}")
        if self.value_size % LANES or not 0 <= self.value_size <= MOST_LATENT:
            raise ValueError(
                f"KVAttention: value_size is a multiple of {LANES} up to {MOST_LATENT}, not {self.value_size}"
            )

    def _check_policies(self) -> None:
        numbers = {policy.number for policy in POLICIES.values()}
        if len(self.policies) not in (1, self.kv_heads) or not set(self.policies) <= numbers:
            names = ", ".join(f"{policy.number} ({name})" for name, policy in POLICIES.items())
            raise ValueError(
                f"KVAttention: policies are one number, or one for each of {self.kv_heads} KV heads, of {names}, not "
                f"{list(self.policies)}"
            )
        for policy in self.policies_in_use:
            policy.check()
        if self.value_size and (self.compensate or self.chooses or self.retrieves):
            raise ValueError(
                "KVAttention: with a value_size policies are dense or streaming, and compensate is 0: pages of latents "
                "are not chosen"
            )
        if self.chunks not in (0, 1) or (self.chunks and not self.window):
            raise ValueError(
                f"KVAttention: chunks is 0, or 1 with a window above 0; it is {self.chunks} with {self.window}"
            )
        if self.compensate and self.window:
            raise ValueError(
                f"KVAttention: with a window of the model's own, {self.window}, no token that streaming drops is to be "
                "seen: compensate must be 0"
            )
        if not all(math.isfinite(slope) for slope in self.slopes):
            raise ValueError(f"KVAttention: slopes are finite, not {list(self.slopes)}")
        if self.slopes and (self.softcap or self.compensate or self.chooses or self.retrieves):
            raise ValueError(
                "KVAttention: with slopes softcap is 0, policies are dense or streaming, and compensate is 0: what "
                "pages score, and what was dropped, has no distance"
            )
        summaries = [policy.name for policy in self.policies_in_use if policy.summary_floats(LANES)]
        if len(summaries) > 1:
            raise ValueError(f"KVAttention: pages have one summary, and {' and '.join(summaries)} each need their own")

    def for_node(self) -> dict[str, Any]:
        """Return the attributes by name, as a node takes them."""
        unused_policies = [policy for policy in POLICIES.values() if policy.number not in self.policies]
        absent = {parameter.name for policy in unused_policies for parameter in policy.parameters()} - _VERSION_1
        if self.clip == 1:
            absent.add("clip")
        by_default = ("value_clip", "token_factors", "value_size", "value_storage", "chunks", "key_feedback", "slopes")
        absent.update(name for name in by_default if not getattr(self, name))
        lists = {"policies": list(self.policies), **({"slopes": list(self.slopes)} if self.slopes else {})}
        return {name: value for name, value in asdict(self).items() if name not in absent} | lists

    @property
    def stored(self) -> Storage:
        """What the storage of keys states about itself."""
        return STORAGE_OF[self.storage]

    @property
    def stored_values(self) -> Storage:
        """What the storage of values states about itself: that of keys, unless they have one of their own."""
        return STORAGE_OF[self.value_storage or self.storage]

    @property
    def share_of_values(self) -> float:
        """What codes of values span of what numbers span: the share of keys, unless they have one of their own."""
        return self.value_clip or self.clip

    @property
    def storage_name(self) -> str:
        """What messages call the storage: of keys and values, or of both by turns."""
        return f"{self.storage} keys and {self.value_storage} values" if self.value_storage else self.storage

    @property
    def unit(self) -> int:
        """Neighbouring codes that are packed together: pages and heads are multiples of it; 1 for floats."""
        return 1 if self.levels is None else max(self.stored.unit, self.stored_values.unit)

    @property
    def levels(self) -> int | None:
        """The largest code of keys; ``None`` where they, and so values too, are floats."""
        return self.stored.levels

    @property
    def value_levels(self) -> int | None:
        """The largest code of values; ``None`` where they are floats."""
        return self.stored_values.levels

    @property
    def parts(self) -> int:
        """How many tensors of a token are stored: key and value, or one row of which the value is a part."""
        return 1 if self.value_size else 2

    def value_channels(self, head_size: int) -> int:
        """Return the numbers of a value, beside keys of ``head_size``."""
        return self.value_size or head_size

    @property
    def slots(self) -> int:
        """R, the pages that a storage of integers holds as floats; 0 where all pages are floats."""
        return 0 if self.levels is None else self.sink_pages + self.recent_pages + 1

    @cached_property
    def policies_in_use(self) -> tuple[Policy, ...]:
        """The policies of the heads, each once, in the order of their numbers."""
        return tuple(policy_numbered(number).of(self) for number in sorted(set(self.policies)))

    @cached_property
    def summary_policy(self) -> Policy | None:
        """The policy that chooses pages by summaries; ``None`` where none of the heads does."""
        return next((policy for policy in self.policies_in_use if policy.summary_floats(LANES)), None)

    @property
    def retrieves(self) -> bool:
        """Whether a head chooses pages by what is in them, so that pages have summaries."""
        return self.summary_policy is not None

    @property
    def chooses(self) -> bool:
        """Whether a head may read a page besides what every query reads."""
        return any(policy.chooses for policy in self.policies_in_use)

    @property
    def may_drop(self) -> bool:
        """Whether every head drops what is neither among the first nor among the newest tokens."""
        return all(policy.may_drop for policy in self.policies_in_use)

    @property
    def summarizes(self) -> bool:
        """Whether `summaries` are in use: to choose pages by, or for what streaming drops."""
        return self.retrieves or self.compensate > 0

    @property
    def first_pages(self) -> int:
        """F, the pages of the sinks, which stay where they are when the cache wraps."""
        return -(-self.sinks // self.page)

    def first_seen(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the first position that the window of the model shows queries at these positions."""
        return first_seen(positions, self.window, self.chunks)

    def policy(self, head: int) -> int:
        """Return the number of the policy of a KV head."""
        return self.policies[head if len(self.policies) > 1 else 0]

    def policy_of(self, head: int) -> Policy:
        """Return the policy of a KV head."""
        return policy_numbered(self.policy(head)).of(self)

    def may_wrap(self, pages: int, columns: int) -> bool:
        """Return whether new tokens may take the place of old ones.

        That is so if every head drops old tokens and a call of ``columns`` tokens overwrites nothing that its queries
        read. With ``compensate`` that is one page more, whose summary stands for all that was dropped.

        Args:
            pages: P, the capacity.
            columns: S, of the call.
        """
        ring = pages - self.first_pages
        return self.may_drop and ring > 0 and ring * self.page >= self.tokens_to_keep(columns)

    def tokens_to_keep(self, columns: int) -> int:
        """Return the tokens that pages behind the sinks must hold to be used again by calls of ``columns`` tokens."""
        return max(self.recent, self.window) + columns + (1 + self.compensate) * self.page

    def physical_page(self, page: npt.ArrayLike, pages: int) -> npt.NDArray[np.int64]:
        """Return which of the ``pages`` pages of capacity holds page ``page`` of the sequence."""
        page, first = np.asarray(page, np.int64), self.first_pages
        return np.where(page < first, page, first + (page - first) % max(1, pages - first))

    def slot(self, page: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return which slot of `recent` page ``page`` of the sequence has, while it is the newest that has it."""
        page = np.asarray(page, np.int64)
        ring = self.sink_pages + (page - self.sink_pages) % (self.recent_pages + 1)
        return np.where(page < self.sink_pages, page, ring)

    def is_recent(self, page: npt.ArrayLike, tokens: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether page ``page`` is read from `recent` once a row has ``tokens`` tokens; for integers only."""
        page, newest = np.asarray(page, np.int64), (np.asarray(tokens, np.int64) - 1) // self.page
        return (page < self.sink_pages) | (page > newest - (self.recent_pages + 1))

    @property
    def most_channels(self) -> int:
        """Numbers of a head, at most: kernels for codes and for the choice of pages have room for fewer."""
        if self.value_size:
            return MOST_LATENT
        return MOST_CHANNELS if self.levels is not None or self.chooses or self.summarizes else MOST_OF_FLOATS

    def summary_floats(self, head_size: int) -> int:
        """Return the first numbers of a page's summary, to choose pages by; means of what was dropped come behind."""
        return self.summary_policy.summary_floats(head_size) if self.summary_policy is not None else 0

    @property
    def token_scales(self) -> int:
        """Numbers of a token in a page of codes: low and step of a value that is stored, and the factor of the key."""
        return 2 * (self.parts - 1) + self.token_factors

    def scale_numbers(self, head_size: int) -> int:
        """Return the float16 numbers that a page of codes has beside them: lows, steps and factors."""
        return 0 if self.levels is None else 2 * head_size + self.token_scales * self.page

    def state(self, batch: Dimension, pages: Dimension, head_size: int) -> StateShapes:
        """Return the shapes and types of the five tensors of the state; a string stands for a dimension of that name.

        Raises:
            ValueError: the head size is not supported.
        """
        most_channels = self.most_channels
        if head_size % LANES or not max(LANES, self.value_size) <= head_size <= most_channels:
            bound = f" from {self.value_size}" if self.value_size else ""
            raise ValueError(
                f"KVAttention: a head size is a multiple of {LANES}{bound} up to {most_channels}, not {head_size}"
            )
        if head_size % self.unit:
            raise ValueError(
                f"KVAttention: with {self.storage_name} a head size is a multiple of {self.unit}, not {head_size}"
            )
        numbers = self.page * head_size
        of_values = 0 if self.value_size else self.stored_values.elements(numbers)
        summaries = self.summary_floats(head_size) + 2 * head_size * self.compensate
        leading = (batch, self.kv_heads, pages)
        return StateShapes(
            keys=StateTensor((*leading, self.stored.elements(numbers)), self.stored.dtype),
            values=StateTensor((*leading, of_values), self.stored_values.dtype),
            scales=StateTensor((*leading, self.scale_numbers(head_size)), np.dtype(np.float16)),
            recent=StateTensor((batch, self.kv_heads, self.slots, numbers * self.parts)),
            summaries=StateTensor((*leading, summaries)),
        )


@dataclass(frozen=True)
class StateTensor:
    """Shape and type of one tensor of the state."""

    shape: tuple[Dimension, ...]
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))

    @property
    def bytes(self) -> int:
        """What it takes.

        Raises:
            ValueError: a dimension is only a name.
        """
        return self.dtype.itemsize * math.prod(self._sizes())

    def zeros(self) -> npt.NDArray[Any]:
        """Return it as it is before the first token.

        Raises:
            ValueError: a dimension is only a name.
        """
        return np.zeros(self._sizes(), self.dtype)

    def _sizes(self) -> tuple[int, ...]:
        sizes = tuple(size for size in self.shape if isinstance(size, int))
        if len(sizes) < len(self.shape):
            raise ValueError(f"a tensor of shape {list(self.shape)} has no size: a dimension is only a name")
        return sizes


@dataclass(frozen=True)
class StateShapes:
    """The five tensors of the state, in the order in which they are inputs (from 7) and outputs (from 1)."""

    keys: StateTensor
    values: StateTensor
    scales: StateTensor
    recent: StateTensor
    summaries: StateTensor

    def __iter__(self) -> Iterator[tuple[str, StateTensor]]:
        for tensor in fields(self):
            yield tensor.name, getattr(self, tensor.name)

    @property
    def bytes(self) -> int:
        """What all of them take."""
        return sum(tensor.bytes for _, tensor in self)

    def zeros(self) -> dict[str, npt.NDArray[Any]]:
        """Return a state without tokens, by name and in order."""
        return {name: tensor.zeros() for name, tensor in self}
