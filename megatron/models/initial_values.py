"""How the weight matrices of a model start, by what they do."""

from __future__ import annotations

import math

from megatron.config.model import ModelConfig
from megatron.topology.param_spec import Normal, XavierUniform


def weight_init(model: ModelConfig) -> Normal | XavierUniform:
    """Of a matrix that reads the residual stream."""
    return XavierUniform() if model.init_method_xavier_uniform else Normal(model.init_method_std)


def branch_output_init(model: ModelConfig) -> Normal | XavierUniform:
    """Of a matrix that adds to the residual stream, once for each of the 2 x layers branches."""
    if model.init_method_xavier_uniform:
        return XavierUniform()
    return Normal(model.init_method_std / math.sqrt(2.0 * model.num_layers))


def embedding_init(model: ModelConfig) -> Normal | XavierUniform:
    """Of word and position embeddings."""
    std = model.embedding_init_method_std
    return weight_init(model) if std is None else Normal(std)
