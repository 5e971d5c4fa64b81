"""What ``tools/bench/ops.py`` is made of: problems, engines, one file for each kind of engine, rounds and reports."""
