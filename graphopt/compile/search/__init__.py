"""What a recipe says, found by measuring: formats of matrices for a number of bytes, rotary factors for a length.

choices.py    formats to choose from, and the bytes that a matrix takes in them
losses.py     what each choice for each matrix costs in divergence
experiment.py the same by any process, from a file
program.py    the integer program that picks one choice for each matrix
run.py        from a model and a number of bytes to a recipe
evolution.py  populations of rotary factors: mutation, crossover, selection
turning.py    what a model makes of rotary factors: they are inputs of its graph
rope.py       from a model and a factor of its trained length to a recipe
lines.py      what was measured, in a file: a search that was cut off goes on
"""

from graphopt.compile.search.choices import CHOICES, Choice
from graphopt.compile.search.evolution import Evolution
from graphopt.compile.search.formats import SearchResult, search
from graphopt.compile.search.rotary import FoundFactors, search_rope

__all__ = ["CHOICES", "Choice", "Evolution", "FoundFactors", "SearchResult", "search", "search_rope"]
