"""Thin Flax Linen modules: they own parameters and name logical axes; the arithmetic is in `ops`."""

from jaxformer.layers.linear import Runtime as Runtime
from jaxformer.layers.parameters import (
    abstract_params as abstract_params,
    init_params as init_params,
    num_params as num_params,
)
from jaxformer.layers.transformer import Transformer as Transformer
