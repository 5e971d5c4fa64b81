"""What a recipe needs to know of a model: statistics of inputs, scores of attention heads."""
