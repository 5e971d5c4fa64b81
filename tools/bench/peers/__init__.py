"""What other quantizers make of a model: their codes decoded, or their graph in onnxruntime."""
