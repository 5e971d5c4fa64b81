"""Drafts of the model itself, read with less: caches that hold few tokens, or its first layers only.

    self:streaming    every head reads the first tokens and the newest (TriForce's first level, Sun et al., 2024)
    self:retrieval    every head reads those and the pages that look worth it (TriForce's second level)
    self:layers=3     the state behind the third layer goes to the last norm and the lm_head (LayerSkip, Elhoushi et
                      al., 2024; a model that was not trained for it drafts worse)

The graph is changed in memory; its weights are the artifact's files.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.analysis.structure.folding import fold
from graphopt.analysis.structure.paged_caches import describe, kv_nodes, layer_of
from graphopt.analysis.structure.ports import past_port
from graphopt.errors import InputError
from graphopt.inference.decoding.proposers.draft_threads import choose_threads
from graphopt.inference.decoding.proposers.model import ModelProposer
from graphopt.ort.session import Entries, open_session
from graphopt.runtime_ops.kv_attention.spec.attributes import STREAMING
from graphopt.tasks.causal_lm.interface import Interface

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.analysis.structure.folding import Folding
    from graphopt.inference.decoding.proposer import Proposer
    from graphopt.inference.session import Session

RECENT = 256
"""Tokens that a draft by streaming or retrieval reads besides the first page, by default."""


class SelfProposer(ModelProposer):
    """Proposes by the model itself, changed so that it reads less."""

    name = "self"
    takes_options = True
    usage = "self:streaming, self:retrieval, self:layers=N"
    summary = "the model itself, with fewer tokens in its caches or with its first layers only"

    @classmethod
    def open(cls, session: Session, options: str, proposer: Proposer | None = None) -> SelfProposer:
        """See :class:`Proposer`.

        Args:
            session: the model.
            options: ``streaming``, ``streaming=N`` with the newest N tokens, ``retrieval=N`` with pages of N tokens, or
                ``layers=N``.
            proposer: what proposes to it, if anything does.

        Raises:
            InputError: there are no such options; or the graph has no caches in pages of which fewer could be read, or
                not so many layers.
        """
        name, _, number = options.partition("=")
        if name not in _CHANGES or not (number.isdigit() or (number == "" and name != "layers")):
            raise InputError(
                f"there are no drafts self:{options}",
                remedy="known are self:streaming, self:retrieval and self:layers=N",
            )
        model = ir.load(session.file)
        _CHANGES[name](model, int(number or RECENT))
        content = ir.to_proto(model).SerializeToString()

        def open_with(threads: int, entries: Entries) -> Session:
            inference = open_session(
                session.file,
                entries={**session.manifest.session, **entries},
                threads=threads,
                native=session.native,
                device=session.device,
                content=content,
            )
            return dataclasses.replace(session, inference=inference, interface=Interface.of_session(inference))

        return cls(choose_threads(session, open_with), source=f"self:{options}", proposer=proposer)


def stream(model: ir.Model, recent: int) -> None:
    """Let every head that reads everything read the first page and the newest tokens only.

    Raises:
        InputError: there is no such head in pages without summaries.
    """
    for node in _dense_caches(model):
        page = layer_of(node).attributes.page
        node.attributes["policies"] = ir.AttrInt64s("policies", [STREAMING])
        node.attributes["sinks"] = ir.AttrInt64("sinks", page)
        node.attributes["recent"] = ir.AttrInt64("recent", max(1, recent))
    describe(model)


def retrieve(model: ir.Model, tokens: int) -> None:
    """Let every head that reads everything read so many tokens in pages that each query chooses.

    The first page and as many of the newest tokens are read besides.

    Raises:
        InputError: there is no such head in pages without summaries.
    """
    from graphopt.passes.cache.sparse_kv import SparseKV  # passes take long to import

    page = max(layer_of(node).attributes.page for node in _dense_caches(model))
    budget = -(-max(1, tokens) // page)
    SparseKV(policy="retrieval", sinks=page, recent=page, budget=budget)(model)


def _dense_caches(model: ir.Model) -> list[ir.Node]:
    """Return the caches in pages whose heads read everything, or what their windows allow.

    Raises:
        InputError: there is none.
    """
    nodes = [node for node in kv_nodes(model.graph) if not layer_of(node).attributes.summarizes]
    if not nodes:
        raise InputError(
            "no layer keeps its cache in pages of which a draft could read fewer",
            remedy="add the step page_kv to the recipe; layers of retrieval or with means stay as they are",
        )
    return nodes


def leave_early(model: ir.Model, layers: int) -> None:
    """Keep the first layers, and what is behind the last one.

    Raises:
        InputError: there are not more layers, or they do not follow one another by a state of one shape.
    """
    graph = model.graph
    folding = fold(graph)
    numbers = folding.layers()
    if not 1 <= layers < len(numbers):
        raise InputError(
            f"a draft of {layers} layers of a model of {len(numbers)}",
            remedy=f"give a number from 1 to {len(numbers) - 1}",
        )
    early, late = _states_behind(folding, numbers[layers - 1], numbers[-1])
    late_nodes = {node for node, layer in folding.layer_of().items() if layer >= layers}
    for use in list(late.uses()):
        if use.node not in late_nodes:
            use.node.replace_input_with(use.idx, early)
    _drop_nodes(model, late_nodes)


def _states_behind(folding: Folding, early_layer: range, late_layer: range) -> tuple[ir.Value, ir.Value]:
    """Return the states that two layers end with.

    Raises:
        InputError: they have none, or of another shape.
    """
    early, late = (folding.segments[layer[-1]].end for layer in (early_layer, late_layer))
    if early is not None and late is not None:
        states = early.outputs[0], late.outputs[0]
        if states[0].shape == states[1].shape and not states[1].is_graph_output():
            return states
    raise InputError("the states between the layers of this graph are not alike", remedy="draft in another way")


def _drop_nodes(model: ir.Model, nodes: set[ir.Node]) -> None:
    """Remove nodes with the graph's outputs that they make, and the states that nothing reads any more."""
    graph = model.graph
    outputs = [value for value in graph.outputs if value.producer() not in nodes]
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    RemoveUnusedNodesPass()(model)
    for value in list(graph.inputs):
        if not value.uses() and past_port(value.name) is not None:
            graph.inputs.remove(value)
    if kv_nodes(graph):
        describe(model)


_CHANGES: dict[str, Callable[[ir.Model, int], None]] = {
    "streaming": stream,
    "retrieval": retrieve,
    "layers": leave_early,
}
