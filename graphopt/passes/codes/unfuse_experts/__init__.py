"""onnxruntime's fused mixtures of experts become products of dequantized codes."""

from graphopt.passes.codes.unfuse_experts.unfuse_experts import UnfuseExperts as UnfuseExperts
