"""Generation and scoring: an explicit cache, one token step, and loops around it."""
