"""What rounding a cache costs a model: methods of papers and of other programs, emulated on keys and values."""
