"""graphopt: the compiler that makes a language model small and fast in onnxruntime."""

__version__ = "0.1.0"
