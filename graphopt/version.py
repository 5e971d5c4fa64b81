"""The version of graphopt; pyproject.toml says the same."""

VERSION = "0.1.0"
