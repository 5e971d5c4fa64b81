"""GGUF files, the format of llama.cpp: a model in one file, its weights mostly as blocks of codes with scales.

    blocks.py       a tensor of the file as an expression, decoded exactly
    file.py         metadata and tensors of a file, opened and checked
    layouts.py      what llama.cpp's converter did to the weights of an architecture, undone
    rope.py         rotary scaling, which transformers does not read from a GGUF file
    checkpoint.py   a model of transformers with the file's configuration and weights, and its tokenizer

The ``gguf`` package, which belongs to llama.cpp, reads files and decodes blocks; transformers maps configurations,
tokenizers and names of tensors.
"""
