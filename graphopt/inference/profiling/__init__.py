"""Where time goes: onnxruntime's profile of a model, told by the nodes of its file."""

from graphopt.inference.profiling.measure import Profile, Run, profile

__all__ = ["Profile", "Run", "profile"]
