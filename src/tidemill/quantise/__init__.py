"""Quantises a checkpoint layer by layer, from calibration text, into a folder that others read too.

Nothing here is needed to serve a model: what is written is read back by `weights/` like any other checkpoint.
"""
