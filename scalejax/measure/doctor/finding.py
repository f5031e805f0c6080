"""What was found, what it should be, and what to do where it is not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from scalejax.core.errors import ConfigError, refusal

Verdict = Literal["ok", "warn", "bad"]
Topic = Literal["versions", "devices", "rates", "host", "storage", "network", "variables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    topic: Topic
    """What it is about."""
    name: str
    """What was looked at."""
    value: str
    """What it is."""
    expected: str | None = None
    """What it should be; None if nothing is known to compare it with."""
    verdict: Verdict = "ok"
    """"bad" where runs fail or take twice as long; "warn" where they may."""
    fix: str | None = None
    """What to do; None where it is as it should be."""
    processes: tuple[int, ...] = ()
    """Of which processes it holds; () of all."""

    def __post_init__(self) -> None:
        if (self.verdict == "ok") != (self.fix is None):
            accepted = "what is not ok needs a fix, and nothing else does"
            raise ConfigError(refusal("fix", self.fix, accepted))


def found(
    topic: Topic,
    name: str,
    value: str,
    expected: str | None = None,
    *,
    warn: bool = False,
    bad: bool = False,
    fix: str,
) -> Finding:
    """A finding that is bad or a warning if so claimed, and else as it should be."""
    verdict: Verdict = "bad" if bad else "warn" if warn else "ok"
    return Finding(
        topic=topic,
        name=name,
        value=value,
        expected=expected,
        verdict=verdict,
        fix=None if verdict == "ok" else fix,
    )


def is_any_bad(findings: Iterable[Finding]) -> bool:
    """Whether something is."""
    return any(finding.verdict == "bad" for finding in findings)


OnStage = Callable[[str], None]
"""Called with the name of each piece of work as it begins."""
