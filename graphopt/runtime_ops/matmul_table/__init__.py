"""Products with weights that are stored as codes into a table of up to 256 values."""
