"""The compiler: pipeline, shards, calibration, search, replay."""
