"""A model of transformers becomes one ONNX graph; that of a causal language model serves prefill and decode."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    INPUT_IDS,
    INPUTS_EMBEDS,
    POSITION_IDS,
    present_port,
)
from graphopt.errors import InputError, MissingDependencyError
from graphopt.models.checkpoint import import_export_packages, quiet, reason_of, task_of_config
from graphopt.models.lowering import lowered_by_node
from graphopt.models.naming import name_parts
from graphopt.models.ports import name_ports
from graphopt.models.recurrence import confirm_convolved, recurrences_as_nodes, simplify
from graphopt.runtime_ops import declare
from graphopt.tasks import TASKS, Task
from graphopt.tasks.causal_lm import CAUSAL_LM

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

OPSET = 23
"""The first opset with ``Attention``, ``RMSNormalization`` and ``RotaryEmbedding``."""

# Axes of a key or value that vary: batch and past. Naming only these saves torch half of its time.
_CACHE_AXES = {"keys": (0, 2), "values": (0, 2), "indexer_keys": (0, 1)}
_FLAGS = ("use_cache", "return_dict", "output_attentions", "output_hidden_states")


def trace(model: Any, source: str, task: Task | None = None) -> ir.Model:
    """Trace ``model`` into one graph: any batch, any number of tokens; a causal one with any past, also an empty one.

    Args:
        model: as from :func:`load_model`.
        source: where it came from, for messages.
        task: of the graph, where the model has several; by default that of its configuration.

    Returns:
        A graph of opset 23 with the inputs and outputs of its task, see :mod:`graphopt.tasks`.

    Raises:
        InputError: the exporter fails on it, or a causal language model keeps no state.
        MissingDependencyError: a package that the exporter needs is missing or too old.
    """
    task = task or task_of_model(model)
    program = export_graph(model, source, task)
    name_ports(program.graph, task)
    finish(program, model, source, task)
    return program


def finish(program: ir.Model, model: Any, source: str, task: Task) -> None:
    """Give nodes and weights of a graph their names, and check that its ports are those of its task.

    Args:
        program: what :func:`export_graph` made, with ports that have their names.
        model: the model that it was made of.
        source: where it came from, for messages.
        task: of the graph.

    Raises:
        InputError: a causal language model keeps no state.
    """
    weights = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    name_parts(program, {name: tuple(tensor.shape) for name, tensor in weights})
    port_names = {framework: name for name, framework in task.framework_names.items()}
    for value in program.graph.outputs:
        value.name = port_names.get(value.name or "", value.name)
    if task.caches and not any(present_port(value) is not None for value in program.graph.outputs):
        raise InputError(
            f"{type(model).__name__} came out without a cache or a state, so it cannot generate token by token",
            file=source,
            remedy="is it a bidirectional model that calls itself causal?",
        )
    task.check(program.graph)
    declare(program)


def export_graph(model: Any, source: str, task: Task) -> ir.Model:
    """Return what transformers' exporter makes of ``model``, with the names that it gives.

    Raises:
        InputError: the exporter fails on it, or it keeps what is neither a key-value cache nor a recurrent state.
        MissingDependencyError: a package that the exporter needs is missing or too old.
    """
    torch, _ = import_export_packages()
    exporters = importlib.import_module("transformers.exporters")
    with quiet():
        try:
            exporter = exporters.OnnxExporter()
        except ImportError as error:
            raise MissingDependencyError(str(error), remedy='pip install "graphopt[export]"') from error
        try:
            # With symbolic shapes few operations meet a cached one, and filling the cache takes a sixth of the export.
            no_fake_cache = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
            quicker = no_fake_cache, _without_stack_traces(), _without_other_families(), lowered_by_node()
            with recurrences_as_nodes() as calls, contextlib.ExitStack() as stack:
                for context in quicker:
                    stack.enter_context(context)
                part, inputs = task.export_parts(model, source)
                if calls.know_tails():
                    part, inputs = task.export_parts(model, source)
                    inputs = _with_longer_text(torch, inputs)
                shapes = {name: _varying(torch, value) for name, value in inputs.items() if name not in _FLAGS}
                vary = torch.export.Dim.AUTO
                axes_by_name = task.varying_axes(part, source).items()
                shapes |= {name: dict.fromkeys(axes, vary) for name, axes in axes_by_name if name in shapes}
                config = exporters.OnnxConfig(dynamic=True, dynamic_shapes=shapes, opset_version=OPSET)
                program: ir.Model = exporter.export(part, inputs, config=config).program
                confirm_convolved(calls)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"transformers cannot export this {type(model).__name__} to ONNX ({reason_of(error)})",
                file=source,
                remedy="graphopt takes what transformers.exporters.OnnxExporter takes; the cause is chained below",
            ) from error
    simplify(program.graph)
    if task.caches:
        confirm_length(program.graph, model, source)
    return program


def _with_longer_text(torch: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return sample inputs with one more new token.

    Of two new tokens all but one are one, and torch decides by whether an axis has one element: what a model cuts out
    of its tokens would hold for two of them only.
    """
    longer = dict(inputs)
    for name in (INPUT_IDS, INPUTS_EMBEDS, POSITION_IDS, ATTENTION_MASK):
        if isinstance(inputs.get(name), torch.Tensor):
            axis = -1 if name == POSITION_IDS else 1
            last = inputs[name].narrow(axis, inputs[name].shape[axis] - 1, 1)
            longer[name] = torch.cat([inputs[name], last + 1 if name == POSITION_IDS else last], dim=axis)
    return longer


def confirm_length(graph: ir.Graph, model: Any, source: str) -> None:
    """Refuse a graph that was traced for one number of tokens only.

    Raises:
        InputError: it was.
    """
    for value in graph.inputs:
        # A length that was symbolic and is fixed is the symbol of its digits.
        is_tokens = value.name in (INPUT_IDS, INPUTS_EMBEDS)
        length = str(value.shape[1]) if is_tokens and value.shape is not None else ""
        if length.isdigit():
            raise InputError(
                f"the trace of this {type(model).__name__} holds for {length} new tokens at a time only",
                file=source,
                tensor=value.name,
                remedy="something in the model decides by the number of its tokens; please report it",
            )


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Keep torch from writing down the lines of Python that made each node: a tenth of a trace, and not kept."""
    config: Any = importlib.import_module("torch.fx.config")
    before = config.do_not_emit_stack_traces
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


@contextlib.contextmanager
def _without_other_families() -> Iterator[None]:
    """Keep transformers from importing the thirty families that it has patches for: a model uses what is imported."""
    patches_by_backend: dict[str, list[tuple[str, str, Any]]] = importlib.import_module(
        "transformers.exporters.utils"
    )._PATCHES
    before = {backend: list(patches) for backend, patches in patches_by_backend.items()}
    families = "transformers.models."
    for patches in patches_by_backend.values():
        patches[:] = [
            patch
            for patch in patches
            if not patch[0].startswith(families) or ".".join(patch[0].split(".")[:4]) in sys.modules
        ]
    try:
        yield
    finally:
        patches_by_backend.update(before)


def task_of_model(model: Any) -> Task:
    """Return what kind of model ``model`` is; of several graphs, the task of the main one."""
    return TASKS[task_of_config(model.config) or CAUSAL_LM.name]


def _varying(torch: Any, value: Any) -> Any:
    """Return which axes of a traced input vary, in the nesting that torch.export expects."""
    vary = torch.export.Dim.AUTO
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(range(value.dim()), vary)
    register = importlib.import_module("transformers.exporters.exporter_dynamo").register_pytree_node
    register(type(value))
    leaves, _ = torch.utils._pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    caches = [getattr(value, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for cache in (value, *caches) for layer in getattr(cache, "layers", ())]
    if not layers:
        return [_varying(torch, leaf) for leaf in leaves]
    growing = {id(getattr(layer, part, None)): axes for layer in layers for part, axes in _CACHE_AXES.items()}
    return [
        dict.fromkeys(growing.get(id(leaf), (0,)) if leaf.is_floating_point() else range(leaf.dim()), vary)
        for leaf in leaves
    ]
