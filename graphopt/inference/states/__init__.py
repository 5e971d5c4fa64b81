"""States: what a model carries from step to step. :mod:`graphopt.inference.states.store` says what they can do."""
