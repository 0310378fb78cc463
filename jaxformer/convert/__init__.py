"""Hugging Face directories to runs and back."""
