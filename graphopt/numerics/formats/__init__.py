"""Number formats: what a code means. A family of formats is one file here, each format an object of that file."""

from graphopt.numerics.formats.format import Format
from graphopt.numerics.formats.registry import FORMATS, format_of, format_stored_as
from graphopt.numerics.formats.steps import integer_step
from graphopt.numerics.formats.table import TableFormat

__all__ = ["FORMATS", "Format", "TableFormat", "format_of", "format_stored_as", "integer_step"]
