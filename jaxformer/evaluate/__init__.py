"""Evaluation of a trained model on its held-out data."""
