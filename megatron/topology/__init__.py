"""Arithmetic of ranks, parameters and pipeline stages; standard library only."""
