"""Layers whose matrices are split over the "tp" axis, with or without the sequence split between them."""
