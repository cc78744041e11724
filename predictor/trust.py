"""How much of what a cache view shows is credited, and when a worker's silence is suspicious."""

from __future__ import annotations

from dataclasses import dataclass

from predictor.feed_state import Trust

_WEIGHT = 0.3  # of the newest word of the engine
# Requests that must have stored blocks, and not one event: no coincidence.
_SILENT_REQUESTS = 20


@dataclass(slots=True)
class ViewTrust:
    """One worker's cache view: what its feed says of it, and how it has compared with reported `cached_tokens`."""

    trust: Trust = Trust.LIVE
    coverage: float = 1.0
    agreement: float = 1.0  # the share of the view's promises that the engine has kept lately
    unannounced: int = 0  # requests since the last event that must have caused one

    @property
    def silent(self) -> bool:
        """The engine serves, and never says what it stores."""
        return self.unannounced >= _SILENT_REQUESTS

    @property
    def whole(self) -> bool:
        """It shows all that the engine has announced."""
        return self.trust is Trust.LIVE and not self.silent

    def credited(self, blocks: int) -> int:
        """Of a run of so many blocks those that a forecast may count on."""
        if self.whole:
            return blocks
        if self.trust is Trust.LOST or self.silent:
            return 0
        return int(blocks * self.agreement)

    def announced(self) -> None:
        """An event came."""
        self.unannounced = 0

    def cleared(self) -> None:
        """The view is empty: it promises nothing that could be wrong."""
        self.agreement = 1.0

    def compare(self, promised_tokens: int, reported_tokens: int) -> None:
        """What the view showed for a request, and what the engine says that it reused."""
        if promised_tokens > 0:
            kept = min(promised_tokens, reported_tokens) / promised_tokens
            self.agreement += _WEIGHT * (kept - self.agreement)

    def served(self, new_blocks: int) -> None:
        """A request has had its first token; it filled so many blocks that were not cached."""
        if new_blocks > 0 and self.trust is not Trust.LOST:
            self.unannounced += 1
