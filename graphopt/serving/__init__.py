"""Serving many requests: onnxruntime-genai's Engine behind NVIDIA Dynamo's OpenAI-compatible front.

    client -> front (HTTP, templates, tokenizer, routing) -> worker -> batch -> Engine -> the graph of the step serve

``batch`` drives the Engine and knows no front; ``worker`` speaks Dynamo's protocol of tokens around it; ``front``
starts the front, and ``replicas`` keeps one front and several workers alive on this machine.
"""
