"""Data parallelism on one bucket: who keeps which part of parameters, gradients and optimizer state."""
