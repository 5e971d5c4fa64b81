"""Models by other quantizers: their codes decoded, or their graphs in onnxruntime."""
