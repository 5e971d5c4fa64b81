"""Which format each matrix gets, for the least divergence in a given number of bytes.

choices.py    formats to choose from, and the bytes that a matrix takes in them
measure.py    what each choice for each matrix costs in divergence: measured once, kept, resumed
program.py    the integer program that picks one choice for each matrix
run.py        from a model and a number of bytes to a recipe
"""

from graphopt.search.choices import CHOICES, Choice
from graphopt.search.run import Found, search

__all__ = ["CHOICES", "Choice", "Found", "search"]
