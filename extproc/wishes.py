"""What callers may ask of us in headers and body, and what we answer when they ask wrongly."""

from __future__ import annotations

import enum
import hashlib
import math
import re
from dataclasses import dataclass
from typing import TypeVar

from extproc.exchange import Headers
from predictor.admission import (
    BOUND_MAX_S,
    BOUND_MIN_S,
    TTFT_BOUND_MAX_S,
    TTFT_BOUND_MIN_S,
    OnReject,
)
from predictor.routing import Prefer

BOUND_HEADER = "x-max-queue-wait-s"
BOUND_FIELD = "max_queue_wait_s"
# llm-d's names, the newer first: it wins.
TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
PREFER_HEADER = "x-headway-prefer"
ON_REJECT_HEADER = "x-headway-on-reject"
TENANT_HEADER = "x-headway-tenant"
# What clients and gateways call a conversation: llm-d, SGLang, AIBrix; Claude Code; OpenCode.
SESSION_HEADERS = ("x-session-id", "x-session-token", "x-claude-code-session-id", "x-session-affinity")
START_HEADER = "x-request-start"
_KEY_HEADERS = ("authorization", "x-api-key")

_WAIT_ALLOWED = f"a number of seconds from {BOUND_MIN_S:g} to {BOUND_MAX_S:g}"
_TTFT_ALLOWED = f"a whole number of milliseconds from {TTFT_BOUND_MIN_S * 1e3:g} to {TTFT_BOUND_MAX_S * 1e3:.0f}"
# What `float` takes besides (1_0, +10, digits of other scripts) no client means.
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NUMBER_LENGTH = 40
_TENANT_LENGTH = 128
_TENANT_ALLOWED = f"1 to {_TENANT_LENGTH} visible ASCII characters without spaces"
_STEERING = frozenset(
    (
        BOUND_HEADER,
        *TTFT_HEADERS,
        PREFER_HEADER,
        ON_REJECT_HEADER,
        TENANT_HEADER,
        *SESSION_HEADERS,
        START_HEADER,
        *_KEY_HEADERS,
    )
)
# A gateway's clock may be a little ahead of ours, and nothing waits for an hour: beyond, it is no time of day.
_CLOCK_SKEW_S, _LONGEST_WAIT_S = 5.0, 3600.0
# What a second is in the unit of a number, by its size: no time of day in one unit looks like one in another.
_UNITS = ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6))

_Choice = TypeVar("_Choice", bound=enum.Enum)


class BadWish(ValueError):
    """The caller's fault: names the field, what was wrong with it, and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        # A list may be nested too deep to be shown.
        shown = f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)
        shown = shown if len(shown) <= 80 else shown[:80] + "..."
        super().__init__(f"{field} must be {allowed}; got {shown}")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request asks for. None: nothing was said."""

    max_queue_wait_s: float | None = None
    max_ttft_s: float | None = None
    prefer: Prefer | None = None
    on_reject: OnReject | None = None
    tenant: str | None = None  # a hash where it is a key
    session: str | None = None  # a hash
    waited_before_s: float = 0.0  # by the word of the gateway before us


_NOTHING_SAID = Wishes()


def read_wishes(
    headers: Headers, bound_field: object, *, by_tenant: bool = False, unix_s: float | None = None
) -> Wishes:
    """Raises BadWish.

    `by_tenant`: the pool tells tenants apart, by their header or else by a hash of their key. `unix_s` is the time now
    where `x-request-start` is to be believed.
    """
    said = headers.first_of(_STEERING)
    if not said and bound_field is None:
        return _NOTHING_SAID
    ttft_header = next((name for name in TTFT_HEADERS if name in said), None)
    session = next((said[name] for name in SESSION_HEADERS if said.get(name)), None)
    return Wishes(
        max_queue_wait_s=queue_wait_bound(said.get(BOUND_HEADER), bound_field),
        max_ttft_s=None if ttft_header is None else _ttft_bound(ttft_header, said[ttft_header]),
        prefer=_choice(Prefer, PREFER_HEADER, said.get(PREFER_HEADER)),
        on_reject=_choice(OnReject, ON_REJECT_HEADER, said.get(ON_REJECT_HEADER)),
        tenant=_tenant(said, by_tenant),
        session=None if session is None else _hash(session),
        waited_before_s=0.0 if unix_s is None else waited_since(said.get(START_HEADER), unix_s) or 0.0,
    )


def queue_wait_bound(header: str | None, field: object) -> float | None:
    """The caller's bound on queue wait in seconds; the header wins over the body's field. Raises BadWish."""
    if header is not None:
        told = header.strip()
        if len(told) > _NUMBER_LENGTH or _NUMBER.fullmatch(told) is None:
            raise BadWish(BOUND_HEADER, header, _WAIT_ALLOWED)
        return _in_range(BOUND_HEADER, float(told), header)
    if field is None:
        return None
    if isinstance(field, bool) or not isinstance(field, (int, float)):
        raise BadWish(BOUND_FIELD, field, _WAIT_ALLOWED)
    return _in_range(BOUND_FIELD, field, field)


def waited_since(start: str | None, unix_s: float) -> float | None:
    """Seconds since a proxy's `x-request-start`: Unix time in seconds, milliseconds, microseconds or nanoseconds, with
    or without `t=` before it (nginx, Heroku, New Relic). None where it is missing, or no time that can be meant."""
    if start is None:
        return None
    try:
        told = float(start.strip().removeprefix("t="))
    except ValueError:
        return None
    if not math.isfinite(told):
        return None
    unit = next((unit for limit, unit in _UNITS if told < limit), 1e9)
    waited_s = unix_s - told / unit
    return max(0.0, waited_s) if -_CLOCK_SKEW_S <= waited_s <= _LONGEST_WAIT_S else None


def _in_range(name: str, bound_s: float, shown: object) -> float:
    if not BOUND_MIN_S <= bound_s <= BOUND_MAX_S:  # false for NaN as well
        raise BadWish(name, shown, _WAIT_ALLOWED)
    return float(bound_s)


def _ttft_bound(name: str, header: str) -> float:
    text = header.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise BadWish(name, header, _TTFT_ALLOWED)
    bound_s = int(text) / 1e3
    if not TTFT_BOUND_MIN_S <= bound_s <= TTFT_BOUND_MAX_S:
        raise BadWish(name, header, _TTFT_ALLOWED)
    return bound_s


def _choice(kind: type[_Choice], name: str, header: str | None) -> _Choice | None:
    if header is None:
        return None
    try:
        return kind(header.strip().lower())
    except ValueError:
        raise BadWish(name, header, "one of " + ", ".join(str(choice.value) for choice in kind)) from None


def _tenant(said: dict[str, str], by_tenant: bool) -> str | None:
    tenant = said.get(TENANT_HEADER)
    if tenant is not None:
        tenant = tenant.strip()
        if not (1 <= len(tenant) <= _TENANT_LENGTH and tenant.isascii() and tenant.isprintable() and " " not in tenant):
            raise BadWish(TENANT_HEADER, said[TENANT_HEADER], _TENANT_ALLOWED)
        return tenant
    if not by_tenant:
        return None
    key = next((said[name] for name in _KEY_HEADERS if said.get(name)), None)
    return None if key is None else "key " + _hash(key)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
