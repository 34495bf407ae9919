"""Data: token files, the GPT sample order, blending, tokenizers and the loader that feeds a training step.

Everything but `loader.py` is numpy and standard library, so data can be prepared and inspected without torch.
"""
