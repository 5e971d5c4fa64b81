"""The queries and keys of a model, as its attention multiplies them: read while it runs in onnxruntime."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.analysis.structure.paged_caches import PagedLayer, kv_nodes, layer_of
from graphopt.compile.compilation import Compilation
from graphopt.errors import InputError
from graphopt.runtime_ops import bodies_aside, port
from graphopt.runtime_ops.kv_attention.spec.attributes import DENSE
from graphopt.tasks.causal_lm.interface import Interface

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnxruntime

    from graphopt.artifact.artifact import Artifact
    from graphopt.graph.diagnostics import PassReport
    from graphopt.tasks.ports import IntArray

Singles = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TappedLayer:
    """Attention of one layer.

    Attributes:
        layer: its cache and attributes.
        query: the value that holds its queries [batch, length, query heads x size], rotary embedding included.
        key: the same of its keys.
        sink_logits: float32 [query heads], or ``None``; see ``KVAttention``.
    """

    layer: PagedLayer
    query: str
    key: str
    sink_logits: Singles | None


@dataclass(frozen=True)
class Heads:
    """What one layer multiplied in one run.

    Attributes:
        tapped_layer: the layer.
        queries: float32 [Hk, length, G, D]; the G query heads of a KV head stand together.
        keys: float32 [Hk, length, D].
    """

    tapped_layer: TappedLayer
    queries: Singles
    keys: Singles


@dataclass(frozen=True)
class Tap:
    """A model that gives its queries and keys instead of its logits.

    Attributes:
        session: of onnxruntime.
        interface: of the model as it was.
        layers: those that see all tokens before them.
        windowed_layers: the numbers of those that have a window of their own.
    """

    session: onnxruntime.InferenceSession
    interface: Interface
    layers: tuple[TappedLayer, ...]
    windowed_layers: tuple[int, ...]

    def run(self, ids: IntArray) -> Iterator[Heads]:
        """Run a sequence, int64 [length], and yield what each layer multiplied.

        Raises:
            InputError: onnxruntime cannot run it.
        """
        tokens = ids[None]
        room = self.interface.empty_past(1, len(ids))
        feeds = self.interface.feeds(tokens, np.ones_like(tokens), room)
        names = list(
            dict.fromkeys(name for tapped_layer in self.layers for name in (tapped_layer.query, tapped_layer.key))
        )
        try:
            values = dict(zip(names, self.session.run(names, feeds), strict=True))
        except Exception as error:
            raise InputError(f"onnxruntime cannot run the model on {len(ids)} tokens: {error}") from error
        for tapped_layer in self.layers:
            heads, size = tapped_layer.layer.attributes.kv_heads, tapped_layer.layer.head_size
            queries = values[tapped_layer.query].reshape(len(ids), heads, -1, size).transpose(1, 0, 2, 3)
            yield Heads(
                tapped_layer, queries, values[tapped_layer.key].reshape(len(ids), heads, size).transpose(1, 0, 2)
            )


@contextlib.contextmanager
def tap(artifact: Artifact) -> Iterator[Tap]:
    """Open a model such that it gives its queries and keys; attention is rewritten as ``page_kv`` does first.

    Raises:
        InputError: ``page_kv`` does not understand its attention, or its heads have policies already.
    """
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        compilation = Compilation.of_pages(artifact, Path(folder))
    model, report = compilation.model, compilation.reports[-1]
    nodes = kv_nodes(model.graph)
    if not nodes:
        raise InputError(f"the attention of this model cannot be measured: {_reason(report)}")
    windowed_layers = tuple(layer_of(node).number for node in nodes if layer_of(node).attributes.window)
    nodes = [node for node in nodes if not layer_of(node).attributes.window]
    if not nodes:
        raise InputError("every layer of this model has a window of its own: there are no heads to choose among")
    for node in nodes:
        if set(layer_of(node).attributes.policies) != {DENSE}:
            raise InputError(
                "its heads have policies already, and what they do not read cannot be measured",
                node=node.name,
                remedy="give the model as it was before the step sparse_kv",
            )
    interface = Interface.of_graph(model.graph)
    interface.check_tokens()
    layers = tuple(_tap_layer(node) for node in nodes)
    ports = [port(node, name) for node in nodes for name in ("query", "key")]
    values = {value.name: value for value in ports if value is not None}
    for value in values.values():
        value.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.clear()
    model.graph.outputs.extend(values.values())
    with bodies_aside(model):
        RemoveUnusedNodesPass()(model)
    with compilation.context.runner.open_model(model) as session:
        yield Tap(session, interface, layers, windowed_layers)


def _tap_layer(node: ir.Node) -> TappedLayer:
    query, key, sinks = (port(node, name) for name in ("query", "key", "sink_logits"))
    assert query is not None and key is not None
    logits = None if sinks is None or sinks.const_value is None else sinks.const_value.numpy()
    return TappedLayer(
        layer_of(node), query.name or "", key.name or "", logits if logits is not None and logits.size else None
    )


def _reason(report: PassReport) -> str:
    return str(report.skips[0].reason) if report.skips else "it has none over a cache"
