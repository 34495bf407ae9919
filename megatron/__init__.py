"""Megatron-style pretraining: one package per floor, imports only downward (see docs/structure.md)."""

__version__ = "0.1.0"
