"""Training: state, step, optimizer, metrics, loop."""
