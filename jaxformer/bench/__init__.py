"""Speed on this machine, as numbers; comparisons with peers live in `tests/bench` and drive the same classes."""
