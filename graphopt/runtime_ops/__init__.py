"""Operators of the domain ``ai.graphopt``: one folder, one operator.

Each folder holds what the operator means (its types, its shape rule and its body in standard ONNX operators), a NumPy
reference written from the definition, and its kernels. A model carries the body, so it runs in any onnxruntime; where
graphopt's library is registered, the kernel takes the node.
"""
