"""Maths on local tensors: no layer, no group, no configuration object; kernels are chosen by their arguments."""
