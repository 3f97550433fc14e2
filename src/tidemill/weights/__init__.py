"""Where weights come from and how they are read.

`locate` turns what the user typed into files on this machine, `open_checkpoint` turns those files into a config and
named dense tensors. Nothing here knows about models, layers or devices, and nothing imports torch before a tensor is
read.
"""
