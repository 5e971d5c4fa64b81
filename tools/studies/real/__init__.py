"""Real models: their sources, and the main job on them."""
