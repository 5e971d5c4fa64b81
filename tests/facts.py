"""A rule of the tests, for facts of any sentence."""

from graphopt.graph.diagnostics import Rule

SENTENCE = Rule("tests.sentence", "{text}")
