"""Fifty varied prompts: prose, code, other scripts, numbers, lists, chat markup, repetition; 1 to 300 tokens."""

from __future__ import annotations

SUBJECTS = ("the tide", "a lighthouse", "photosynthesis", "the French Revolution", "sourdough", "a lost umbrella")
OPENINGS = (
    "Explain {} to a child.",
    "Write a short poem about {}:\n",
    "Three facts about {}:\n1.",
    "Q: What is {}?\nA:",
)
OTHERS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    "SELECT name, age FROM users WHERE",
    '{"name": "tidemill", "version":',
    "1 2 3 4 5 6 7 8 9",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "Liebe Gäste, willkommen im",
    "Les enfants jouent dans le",
    "東京は日本の",
    "Привет, как",
    "😀 😃 😄",
    "a a a a a a a a",
    "   indented\n\t\ttabs\n\n\n",
    "To be, or not to be, that is",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "ERROR 2024-01-01 12:00:00 connection",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "List of prime numbers: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, " * 6,
    "In the beginning God created the heaven and the earth. " * 20,
    "Shared preface for several prompts, long enough to fill a few blocks of the cache. " * 4 + "First question:",
    "Shared preface for several prompts, long enough to fill a few blocks of the cache. " * 4 + "Second question:",
)

PROMPTS = tuple(opening.format(subject) for subject in SUBJECTS for opening in OPENINGS) + OTHERS
assert len(PROMPTS) == 50
