"""What the inputs of products look like, collected by running the graph itself on a text.

partition.py   a graph cut into parts that run one after the other
moments.py     sums over tokens: Hessian, mean, largest, kurtosis
squares.py     of these, X^T X in blocks
integers.py    products by way of integers of 11 bits
store.py       the folder where they lie, by content of model and text
windows.py     one text through one piece, on any machine
collect.py     the run: piece by piece, text by text, resumed where it was cut off
"""

from graphopt.quantization.statistics.collect import Calibration
from graphopt.quantization.statistics.store import InputStatistics

__all__ = ["Calibration", "InputStatistics"]
