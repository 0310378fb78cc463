"""The zoo: every family, what was published of it, and how close we are to transformers, measured."""
