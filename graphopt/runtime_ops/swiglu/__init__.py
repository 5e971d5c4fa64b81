"""``SwiGLU``: the gate of an MLP times what it lets through, both from one product."""
