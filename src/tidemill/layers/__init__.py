"""The parts models are made of: linear, norm, rope, attention. Each declares the checkpoint tensors it holds."""
