"""One kind of fault of a file: how it is found, what it costs, and the passes that mend it."""

from __future__ import annotations

import abc
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from graphopt.artifact import artifact as artifacts
from graphopt.artifact.artifact import MODEL
from graphopt.graph.diagnostics import Fact
from graphopt.ort.capacity import no_room_for
from graphopt.ort.session import AS_IT_LIES, open_session
from graphopt.tasks import TASKS
from graphopt.util.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnxruntime

    from graphopt.tasks import Probe

Level = Literal["fault", "hint"]
"""``fault``: the file can do the same with less. ``hint``: it could, if programs that run it take part."""


class Symptom(BaseModel):
    """One thing that is wrong with a file.

    Attributes:
        code: the examination that found it; the heading of its section in ``docs/doctor.md``.
        level: see :data:`Level`.
        fact: the sentence, with its figures.
        nodes: where.
        bytes_saved: by how much the steps make the file smaller; ``None`` where it is not about size.
        remedy: what to do: the passes that mend it, or a command.
        steps: the passes that ``--fix`` applies; none where the choice is not the doctor's.
    """

    model_config = ConfigDict(extra="forbid")

    code: str
    level: Level
    fact: Fact
    nodes: list[str]
    bytes_saved: int | None = None
    remedy: str
    steps: list[str]


class Patient:
    """A file that is examined: read, and run where that is asked for and there is memory.

    Args:
        path: an artifact or an ``.onnx`` file.
        inputs: of a graph that reads no text, what it is fed; ``None`` for random inputs.
        run: whether to open and run it in onnxruntime.

    Attributes:
        model: the graph.
        task: what kind of model it is.
        why_not: why it is not run.

    Raises:
        InputError: it cannot be read.
    """

    def __init__(self, path: Path, inputs: Path | None = None, *, run: bool = True) -> None:
        artifact = artifacts.read(path)
        self.path, self.model = path, artifact.model
        self.file = path / MODEL if path.is_dir() else path
        self.entries = artifact.manifest.session
        self.task = TASKS[artifact.manifest.task].with_inputs(inputs)
        self.may_run = run
        self.why_not = no_room_for(self.model) if run else None

    @property
    def is_run(self) -> bool:
        """Whether it may be run here."""
        return self.may_run and self.why_not is None

    @cached_property
    def session(self) -> onnxruntime.InferenceSession:
        """The file in onnxruntime, with one thread."""
        return open_session(self.file, entries=self.entries, threads=1)

    @cached_property
    def probe(self) -> Probe:
        """What it is fed."""
        return self.task.probe(self.model.graph)

    @cached_property
    def runtime_graph(self) -> ir.Graph:
        """The graph that onnxruntime runs, after its own optimizations."""
        with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
            file = Path(folder) / "optimized.onnx"
            open_session(self.file, entries={**self.entries, **AS_IT_LIES}, optimized_to=file)
            return ir.load(file).graph

    @property
    def nodes(self) -> list[ir.Node]:
        """All nodes, those of branches and loops too."""
        return list(self.model.graph.all_nodes())


class Examination(abc.ABC):
    """Looks for one kind of fault. A new kind is one file with a class of this kind.

    Attributes:
        name: its code, and the heading of its section in ``docs/doctor.md``.
        level: see :data:`Level`.
        remedy: what to do.
        steps: the passes that mend it, by their names; none where the choice is not the doctor's.
        runs: whether it needs onnxruntime.
    """

    name: ClassVar[str]
    level: ClassVar[Level] = "fault"
    remedy: ClassVar[str]
    steps: ClassVar[tuple[str, ...]] = ()
    runs: ClassVar[bool] = False

    @abc.abstractmethod
    def find(self, patient: Patient) -> Iterator[Symptom]:
        """Yield what is wrong."""

    def symptom(
        self,
        fact: Fact,
        nodes: Sequence[ir.Node | ir.Value],
        *,
        bytes_saved: int | None = None,
        steps: Sequence[str] | None = None,
    ) -> Symptom:
        """Return a symptom of this kind; ``steps`` in the place of those of the class."""
        return Symptom(
            code=self.name,
            level=self.level,
            fact=fact,
            nodes=[node.name or "?" for node in nodes],
            bytes_saved=bytes_saved,
            remedy=self.remedy,
            steps=list(self.steps if steps is None else steps),
        )


def _name_of(member: Any) -> str | None:
    is_one = isinstance(member, type) and issubclass(member, Examination)
    return getattr(member, "name", None) if is_one else None


EXAMINATIONS: Registry[type[Examination]] = Registry(
    "graphopt.compile.doctor.examinations", kind="examination", name_of=_name_of
)
"""The examinations by name."""
