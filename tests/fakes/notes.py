"""A log that keeps what it is told, and the value of a counter."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from extproc.log import JsonLog


class Notes(JsonLog):
    """Takes the place of the log; it has no thread and writes nothing."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def __call__(self, event: str, **fields: object) -> None:
        self.lines.append({"event": event, **fields})

    def later(self, event: str, describe: Callable[..., Mapping[str, object]], *about: object) -> None:
        self(event, **describe(*about))

    def close(self, timeout_s: float = 2.0) -> None:
        del timeout_s

    def of(self, event: str) -> list[dict[str, object]]:
        return [line for line in self.lines if line["event"] == event]


def counted(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """The sum of a counter's series that have these labels; 0 if nothing was counted."""
    wanted = f"headway_{name}_total"
    families = registry.restricted_registry([wanted]).collect()
    samples = (sample for family in families for sample in family.samples if sample.name == wanted)
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())
