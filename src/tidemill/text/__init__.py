"""Text in and out of tokens: tokenizers, chat templates, and what is parsed from or forced onto generated text.

Nothing here imports torch, and transformers only where a model leaves no other way.
"""
