"""The parts models are made of: linear, embedding, norm, rope, attention. Each declares the checkpoint tensors it holds."""
