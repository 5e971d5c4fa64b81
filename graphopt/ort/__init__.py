"""onnxruntime: sessions, and running models and parts of models."""
