"""What a recipe says, found by measuring: formats of matrices for a number of bytes, rotary factors for a length.

caches.py        storages of the caches of each layer
choices.py       formats to choose from, and the bytes that a matrix takes in them
losses.py        what each choice for each matrix costs in divergence
program.py       the integer program that picks one choice for each matrix
mixtures.py      mixtures of choices, judged by the model as a whole: an evolution
experiment.py    a matrix or a mixture, measured by any process, from a file
trials.py        the tasks of an experiment, what was measured before left out
formats.py       from a model and a number of bytes to a recipe
float_weights.py from a model that makes no text to a recipe: weights that stay in floats
evolution.py     populations of rotary factors: mutation, crossover, selection
rotary_inputs.py what a model makes of rotary factors: they are inputs of its graph
rotary.py        from a model and a factor of its trained length to a recipe
jsonl.py         what was measured, in a file: a search that was cut off goes on
"""

from graphopt.compile.search.caches import MEASURED_STORAGE, STORAGES, CacheStorages, search_caches
from graphopt.compile.search.choices import CHOICES, Choice
from graphopt.compile.search.evolution import Evolution
from graphopt.compile.search.float_weights import FloatWeights, search_float_weights
from graphopt.compile.search.formats import SearchResult, search
from graphopt.compile.search.mixtures import MixtureSearch
from graphopt.compile.search.rotary import FoundFactors, search_rope

__all__ = [
    "CHOICES",
    "MEASURED_STORAGE",
    "STORAGES",
    "CacheStorages",
    "Choice",
    "Evolution",
    "FloatWeights",
    "FoundFactors",
    "MixtureSearch",
    "SearchResult",
    "search",
    "search_caches",
    "search_float_weights",
    "search_rope",
]
