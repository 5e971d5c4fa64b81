"""The version of graphopt; must equal the one in pyproject.toml."""

VERSION = "0.2.0"
