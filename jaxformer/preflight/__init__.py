"""Whether a config compiles for a TPU or GPU topology, fits in its memory, and how fast it can be.

No accelerator is needed: the step is compiled ahead of time (`compile`). `hlo` and `traffic` read collectives and HBM
traffic from the compiled program, `flops` and `memory` count on the traced one, `roofline` turns the counts into a
time, `suggest` looks for changes with which a config fits, and `page` prints the report (`report`).
"""
