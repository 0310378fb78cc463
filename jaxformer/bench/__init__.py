"""Benchmarks of this library. Comparisons with other libraries are in `tests/bench`."""
