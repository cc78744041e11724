"""How much of a pool each tenant has been using lately, so that one caller's giants do not get others refused."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2

# The smallest are forgotten beyond this: a tenant's name may be whatever a caller sends.
_MOST_TENANTS = 1024
# Who has less than a token left has not been here lately.
_NOTHING_TOKENS = 1.0


@dataclass(frozen=True, slots=True)
class FairnessPolicy:
    """A tenant that has used more than `1 / tenants` of what was used lately may only find waits up to `wait_s`.

    Others then find that at most, and what one request of its adds. Alone in the pool, a tenant may use it all.
    """

    wait_s: float = 2.0
    half_life_s: float = 60.0


class TenantUse:
    """Tokens that had to be prefilled, by tenant, fading with time."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._tokens: dict[str, float] = {}  # as of the moment of the last change
        self._total = 0.0
        self._as_of_s = 0.0

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tenant: str, tokens: float, now_s: float) -> None:
        self._fade(now_s)
        self._tokens[tenant] = self._tokens.get(tenant, 0.0) + tokens
        self._total += tokens
        if len(self._tokens) > _MOST_TENANTS:
            self._forget_small_ones()

    def over_share(self, tenant: str, now_s: float) -> bool:
        """Whether this tenant has used more than an equal share, and there are others."""
        self._fade(now_s)
        used = self._tokens.get(tenant, 0.0)
        return len(self._tokens) > 1 and used * len(self._tokens) > self._total

    def _fade(self, now_s: float) -> None:
        # Once a second at most: in between it makes no difference, and there may be a thousand of them.
        passed_s = now_s - self._as_of_s
        if passed_s < 1.0:
            return
        self._as_of_s = now_s
        factor = exp2(-passed_s / self._half_life_s)
        faded = ((name, tokens * factor) for name, tokens in self._tokens.items())
        self._tokens = {name: tokens for name, tokens in faded if tokens >= _NOTHING_TOKENS}
        self._total = sum(self._tokens.values())

    def _forget_small_ones(self) -> None:
        kept = sorted(self._tokens.items(), key=lambda item: item[1], reverse=True)[: _MOST_TENANTS // 2]
        self._tokens = dict(kept)
        self._total = sum(self._tokens.values())
