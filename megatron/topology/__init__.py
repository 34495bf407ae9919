"""Arithmetic of ranks and parameters; standard library only."""
