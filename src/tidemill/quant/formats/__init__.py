"""Formats of quantised checkpoints: each finds its matrices in a directory of tensors and reads them as stored.

Torch is imported when a matrix is read, so that planning and refusing need none.
"""
