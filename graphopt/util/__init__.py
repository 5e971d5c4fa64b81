"""What every layer uses and that knows nothing of models: memory, processors, progress, targets, text."""
