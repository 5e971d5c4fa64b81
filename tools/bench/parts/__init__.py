"""The parts of the benchmarks: problems, engines, one file for each kind of engine, rounds and reports."""
