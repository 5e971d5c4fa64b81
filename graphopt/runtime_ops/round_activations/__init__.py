"""``RoundActivations``: what a product rounds its input to; the logical form of it, before ``lower``."""
