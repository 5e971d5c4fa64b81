"""A GGUF file as a model of transformers.

    layouts.py      what llama.cpp's converter did to the weights of an architecture, undone
    rope.py         rotary scaling, which transformers does not read from a GGUF file
    settings.py     what else a configuration must say: read, derived, or refused by name
    checkpoint.py   a model with the file's configuration and weights

transformers maps configurations, tokenizers and names of tensors.
"""
