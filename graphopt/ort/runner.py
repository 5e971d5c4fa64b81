"""The one runner of models and of parts of models: sessions, temporary files and results in one place.

model --settled in a file--> open          whole models, before and after a pass
model --outputs changed----> open_model    queries and keys of a calibration
part  --cut out------------> run           masks and lengths: what their arithmetic means
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.ort.session import Array, open_session, run, session_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import onnxruntime

# Bytes of weights up to which a part is told from others by its content, and of results that are kept.
_SMALL, _MAX_RESULTS = 1 << 20, 1 << 24

Results = list[list[Array]]


class Runner:
    """Runs models in onnxruntime on the CPU; what a small part computes is kept by the content of part and inputs.

    Args:
        entries: onnxruntime session entries to run whole models with.
        native: whether graphopt's own kernels take the nodes of its operators, where they were built. Without them the
            bodies run that the model carries, which is what onnxruntime runs anywhere else.
    """

    def __init__(self, entries: Mapping[str, str] | None = None, *, native: bool = True) -> None:
        self.entries, self.native = dict(entries or {}), native
        self._results: dict[str, Results] = {}

    def open(
        self, path: Path, *, in_place: bool = False, entries: Mapping[str, str] | None = None
    ) -> onnxruntime.InferenceSession:
        """Open a model that lies in a file, see :func:`graphopt.ort.session.open_session` for errors.

        Args:
            path: the file.
            in_place: see there.
            entries: session entries beside those of the runner.
        """
        return open_session(path, entries=self.entries | dict(entries or {}), native=self.native, in_place=in_place)

    @contextlib.contextmanager
    def open_model(self, model: ir.Model, *, rewritten: bool = True) -> Iterator[onnxruntime.InferenceSession]:
        """Open a model in memory, through a temporary file; errors are those of :meth:`open`.

        Args:
            model: the model.
            rewritten: whether onnxruntime may rewrite it, see :func:`graphopt.ort.session.open_session`.
        """
        with session_of(model, entries=self.entries, native=self.native, rewritten=rewritten) as session:
            yield session

    def run(self, part: ir.Model, calls: Sequence[Mapping[str, Array]]) -> Results:
        """Return the outputs of ``part`` for each of ``calls``, which may hold more than the inputs that it has.

        Raises:
            Exception: whatever onnxruntime raises where it cannot run the part.
        """
        names = [value.name or "" for value in part.graph.inputs]
        inputs = [{name: call[name] for name in names} for call in calls]
        key = _key(part, inputs)
        if key in self._results:
            return self._results[key]
        with self.open_model(part) as session:
            results = [run(session, None, feeds) for feeds in inputs]
        if key and _bytes_of(results) <= _MAX_RESULTS:
            self._results[key] = results
        return results


def part_of(model: ir.Model, value: ir.Value) -> ir.Model:
    """Return the part of ``model`` that computes ``value``, with those of its inputs that it reads.

    Raises:
        ValueError: it cannot be cut out, since it captures values of an outer graph.
    """
    part = ir.convenience.extract(model.graph, list(model.graph.inputs), [value])
    for port in [port for port in part.inputs if not port.uses()]:
        part.inputs.remove(port)
    return ir.Model(part, ir_version=model.ir_version)


def _bytes_of(results: Results) -> int:
    return sum(array.nbytes for outputs in results for array in outputs)


def _key(part: ir.Model, calls: Sequence[Mapping[str, Array]]) -> str:
    """Return a hash of the part and of what it is fed; empty where its weights are too large to read them for that."""
    # By name: cutting out leaves the weights in any order.
    tensors = {name: value.const_value for name, value in sorted(part.graph.initializers.items())}
    if sum(tensor.nbytes for tensor in tensors.values() if tensor is not None) > _SMALL:
        return ""
    digest = hashlib.sha256(f"{part.opset_imports} {part.graph.inputs} {part.graph.outputs}".encode())
    for node in part.graph:
        digest.update(ir.to_proto(node).SerializeToString(deterministic=True))
    for name, tensor in tensors.items():
        if tensor is not None:
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    for call in calls:
        for name, array in call.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
