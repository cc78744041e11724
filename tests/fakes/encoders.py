"""Tokenizers that behave badly, or so simply that a test can count."""

import threading

import numpy as np

from predictor.prompt import Tokens
from predictor.tokenizer import Tokenizer


class OneTokenAByte(Tokenizer):
    """Token ids are the bytes of the text."""

    def __init__(self) -> None:
        self.library = "fake"

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        del add_special_tokens
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


class HeldTokenizer(OneTokenAByte):
    """Keeps its threads waiting until `let_go`; says in `entered` how many have come."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self._gate = threading.Event()

    def let_go(self) -> None:
        self._gate.set()

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        self.entered.release()
        assert self._gate.wait(30)
        return super().encode(text, add_special_tokens)


class BrokenTokenizer(HeldTokenizer):
    """Raises once it is let go."""

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        super().encode(text, add_special_tokens)
        raise ZeroDivisionError("the tokenizer is broken")
