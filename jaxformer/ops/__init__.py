"""Pure functions on arrays, no Flax."""
