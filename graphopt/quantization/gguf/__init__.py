"""GGUF files, the format of llama.cpp: a model in one file, its weights mostly as blocks of codes with scales.

    blocks.py   a tensor of the file as an expression, decoded exactly
    file.py     metadata and tensors of a file, opened and checked
    codes.py    codes and scales of a tensor in formats of ours

The ``gguf`` package, which belongs to llama.cpp, reads files and decodes blocks. How a file becomes a model of
transformers is in :mod:`graphopt.models.gguf`.
"""
