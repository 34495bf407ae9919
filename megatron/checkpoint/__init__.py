"""Checkpoints that are complete or invisible, verified as they are read, and readable by any parallel layout.

`save.save_checkpoint` and `load.load_checkpoint` are the two collective calls; `catalog.find_checkpoint` and
`reader.Checkpoint` need no process group, and `catalog` and `format` no torch. `pieces` says which part of which global
tensor a rank holds.
"""
