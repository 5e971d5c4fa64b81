"""Real models: where they come from, and the main job on them."""
