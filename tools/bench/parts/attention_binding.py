"""Graphs of several attentions in onnxruntime, whose caches are updated in place: input and output at one address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from tools.bench.parts.engine import optional
from tools.bench.parts.problem import Array


class Binding:
    """A session that reads and writes arrays where they lie."""

    def __init__(self, session: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Bind arrays by name; an array among both is changed in place."""
        optional("onnxruntime")
        self.session, self.binding = session, session.io_binding()
        self.arrays = (dict(inputs), dict(outputs))  # onnxruntime only points to them
        for bind, arrays in zip((self.binding.bind_input, self.binding.bind_output), self.arrays, strict=True):
            for name, array in arrays.items():
                if not array.flags.c_contiguous:
                    raise ValueError(f"{name} is not contiguous")
                # the ONNX type: onnxruntime does not know all of NumPy's
                element_type = int(ir.DataType.from_numpy(array.dtype))
                bind(name, "cpu", 0, element_type, array.shape, array.ctypes.data)

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding)
