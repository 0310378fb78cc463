"""The model zoo: every family, its published sizes, and its measured parity with transformers."""
