"""KVAttention by its kernel: one node in a session of onnxruntime, its state copied or changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from graphopt.ort.session import array_of, ort_value, run
from graphopt.runtime_ops import DOMAIN, library_path

INPUTS = {
    "query": 3,
    "key": 3,
    "value": None,
    "past": 1,
    "new": 1,
    "sink_logits": 1,
    "sink_query": None,
    "keys": 4,
    "values": 4,
    "scales": 4,
    "recent": 4,
    "summaries": 4,
}
STATE = ("keys", "values", "scales", "recent", "summaries")
NODE = "the attention"
_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float8": TensorProto.FLOAT8E4M3FN,
    "int8": TensorProto.UINT8,
    "int4": TensorProto.UINT8,
    "int6": TensorProto.UINT8,
    "int3": TensorProto.UINT8,
    "int2": TensorProto.UINT8,
    "int1": TensorProto.UINT8,
}


class Native:
    """Runs the operator by its kernel; call it as the reference.

    Args:
        threads: of the session.
        in_place: the state's outputs are the state's inputs, which change.
        activations: the type of query, key, value, `sink_query` and y; on a GPU it may be float16.
    """

    def __init__(self, threads: int = 1, in_place: bool = False, activations: type = np.float32) -> None:
        self.threads, self.in_place, self.activations = threads, in_place, activations
        self.sessions: dict[str, onnxruntime.InferenceSession] = {}

    def session(self, attributes: dict[str, Any]) -> onnxruntime.InferenceSession:
        """Return the session of a node with these attributes."""
        key = repr(sorted(attributes.items()))
        if key not in self.sessions:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = self.threads
            options.log_severity_level = 4
            options.register_custom_ops_library(str(library_path()))
            model = model_of(attributes, self.activations).SerializeToString()
            self.sessions[key] = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return self.sessions[key]

    def __call__(self, *inputs: np.ndarray, **attributes: Any) -> Sequence[np.ndarray]:
        session = self.session(attributes)
        feeds = dict(zip(names_of(attributes), inputs, strict=True))
        if not self.in_place:
            return run(session, None, feeds)
        binding, _ = bind(session, feeds)
        session.run_with_iobinding(binding)
        # onnxruntime returns a view of memory that ends with the binding
        return [array_of(each) for each in binding.get_outputs()]


def names_of(attributes: dict[str, Any]) -> list[str]:
    """Return the names of the inputs of a node, in order."""
    return [*INPUTS, *(["feedback"] if attributes.get("key_feedback") else [])]


def bind(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
    """Return an I/O binding whose state is changed in place, and the bound values by name."""
    binding = session.io_binding()
    values = {name: ort_value(tensor.copy()) for name, tensor in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y")
    for name in STATE:
        binding.bind_ortvalue_output(f"{name}_after", values[name])
    return binding, values


def model_of(attributes: dict[str, Any], activations: type = np.float32) -> Any:
    """Return a model of one node, all inputs of which are inputs of the graph."""
    types = dict.fromkeys(INPUTS, TensorProto.FLOAT)
    of_activations = helper.np_dtype_to_tensor_dtype(np.dtype(activations))
    types |= dict.fromkeys(("query", "key", "value", "sink_query"), of_activations)
    types["past"] = types["new"] = TensorProto.INT64
    types["keys"] = types["values"] = _TYPES.get(attributes["storage"], TensorProto.FLOAT)
    types["scales"] = types["feedback"] = TensorProto.FLOAT16
    ranks = {name: INPUTS.get(name, 3) for name in names_of(attributes)}
    inputs = [
        helper.make_tensor_value_info(
            name, types[name], None if rank is None else [f"{name}{axis}" for axis in range(rank)]
        )
        for name, rank in ranks.items()
    ]
    outputs = [helper.make_tensor_value_info("y", of_activations, None)]
    outputs += [helper.make_tensor_value_info(f"{name}_after", types[name], None) for name in STATE]
    node = helper.make_node(
        "KVAttention", list(ranks), [output.name for output in outputs], name=NODE, domain=DOMAIN, **attributes
    )
    graph = helper.make_graph([node], "one", inputs, outputs)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
