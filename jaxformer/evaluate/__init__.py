"""Evaluation of a model on its held-out data: one file per metric, one loop for training and `jaxformer evaluate`."""
