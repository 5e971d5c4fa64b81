"""Numbers rounded to few bits and turned back at once: an emulation, to see what such storage would do."""

from graphopt.runtime_ops.round_trip.op import ROUND_TRIP

__all__ = ["ROUND_TRIP"]
