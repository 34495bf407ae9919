"""Optimizers over flat buckets: update rules, clipping, schedules, loss scale; knows neither model nor pipeline."""
