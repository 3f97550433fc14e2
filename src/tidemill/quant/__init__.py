"""Weights in fewer bits: which schemes there are, how packed numbers lie in memory, and how they are made."""
