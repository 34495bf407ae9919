"""Run a pipeline schedule on the stages of one rank."""
