"""What the simulated model says: words, the same for the same prompt.

Only tokens that are whole words come out, so a client that sends the text back in its next turn gets the same ids for
it.
"""

from collections.abc import Sequence

from enginesim.block_hash import ROOT, hash_block
from enginesim.request import Request

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class WordSampler:
    """Draws from `token_ids` by the request's seed and the position in its output."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise ValueError("token_ids must not be empty")
        self._token_ids = token_ids

    def __call__(self, request: Request) -> int:
        """The token that follows on what `request` has generated so far."""
        return self._token_ids[_mix(request.seed + request.output_tokens * _GOLDEN) % len(self._token_ids)]


def content_seed(request: Request, choice: int = 0, seed: int = 0) -> int:
    """A 64-bit seed from a prompt whose blocks are hashed, which of its choices this is, and the client's own seed."""
    tail = request.token_ids[len(request.block_hashes) * request.block_size :]
    parent = request.block_hashes[-1] if request.block_hashes else ROOT
    return hash_block(parent, [*tail, choice, seed & 0xFFFFFFFF])


def _mix(value: int) -> int:
    """The finalizer of splitmix64: neighbours in, unrelated numbers out."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
