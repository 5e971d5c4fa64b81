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
from graphopt.inference.decoding.drafts.model import ModelDrafter
from graphopt.inference.decoding.drafts.thread_choice import in_turns
from graphopt.ort.session import Entries, open_session
from graphopt.runtime_ops.kv_attention.spec.attributes import STREAMING
from graphopt.tasks.causal_lm.interface import Interface

if TYPE_CHECKING:
    from graphopt.inference.decoding.drafts.drafter import Drafter
    from graphopt.inference.session import Session

RECENT = 256
"""Tokens that a draft by streaming or retrieval reads besides the first page, by default."""


def own_drafter(session: Session, kind: str, drafter: Drafter | None = None) -> ModelDrafter:
    """Return a drafter made of the model itself.

    Args:
        session: the model.
        kind: ``streaming``, ``streaming=N`` with the newest N tokens, ``retrieval=N`` with pages of N tokens, or
            ``layers=N``.
        drafter: what drafts for it, if anything does.

    Raises:
        InputError: there is no such kind; or the graph has no caches in pages to stream, or not so many layers.
    """
    name, _, value = kind.partition("=")
    if (
        name not in ("streaming", "retrieval", "layers")
        or (value and not value.isdigit())
        or (name == "layers" and not value)
    ):
        raise InputError(
            f"there is no draft self:{kind}", remedy="known are self:streaming, self:retrieval and self:layers=N"
        )
    model = ir.load(session.file)
    if name == "streaming":
        stream(model, int(value or RECENT))
    elif name == "retrieval":
        retrieve(model, int(value or RECENT))
    else:
        leave_early(model, int(value))
    changed = ir.to_proto(model).SerializeToString()

    def opened(threads: int, entries: Entries) -> Session:
        inference = open_session(
            session.file,
            entries={**session.manifest.session, **entries},
            threads=threads,
            native=session.native,
            device=session.device,
            changed=changed,
        )
        return dataclasses.replace(session, inference=inference, interface=Interface.of_session(inference))

    return ModelDrafter(in_turns(session, opened), source=f"self:{kind}", drafter=drafter)


def stream(model: ir.Model, recent: int) -> None:
    """Let every head that reads everything read the first page and the newest tokens only.

    Raises:
        InputError: there is no such head in pages without summaries.
    """
    for node in _dense(model):
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
    from graphopt.passes.cache.sparse_kv import SparseKV, SparseKVOptions  # passes take long to import

    page = max(layer_of(node).attributes.page for node in _dense(model))
    budget = -(-max(1, tokens) // page)
    SparseKV(SparseKVOptions(policy="retrieval", sinks=page, recent=page, budget=budget))(model)


def _dense(model: ir.Model) -> list[ir.Node]:
    """Return the caches in pages whose heads read everything, or what their windows allow.

    Raises:
        InputError: there is none.
    """
    found = [node for node in kv_nodes(model.graph) if not layer_of(node).attributes.summarizes]
    if not found:
        raise InputError(
            "no layer keeps its cache in pages of which a draft could read fewer",
            remedy="add the step page_kv to the recipe; layers of retrieval or with means stay as they are",
        )
    return found


def leave_early(model: ir.Model, layers: int) -> None:
    """Keep the first layers, and what is behind the last one.

    Raises:
        InputError: there are not more layers, or they do not follow one another by a state of one shape.
    """
    graph = model.graph
    folding = fold(graph)
    every = folding.layers()
    if not 1 <= layers < len(every):
        raise InputError(
            f"a draft of {layers} layers of a model of {len(every)}", remedy=f"give a number from 1 to {len(every) - 1}"
        )
    ends = [folding.segments[every[number][-1]].end for number in (layers - 1, -1)]
    states = [None if end is None else end.outputs[0] for end in ends]
    early, late = states
    if early is None or late is None or early.shape != late.shape or late.is_graph_output():
        raise InputError("the states between the layers of this graph are not alike", remedy="draft in another way")
    dropped = {node for node, layer in folding.layer_of().items() if layer >= layers}
    for node, place in list(late.uses()):
        if node not in dropped:
            node.replace_input_with(place, early)
    kept = [value for value in graph.outputs if value.producer() not in dropped]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    RemoveUnusedNodesPass()(model)
    unread = [value for value in graph.inputs if not value.uses() and past_port(value.name) is not None]
    for value in unread:
        graph.inputs.remove(value)
    if kv_nodes(graph):
        describe(model)
