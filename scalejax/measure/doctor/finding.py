"""One finding of the health check: a value, its expected value, a verdict and a fix."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from scalejax.core.errors import ConfigError, refusal
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular

Verdict = Literal["ok", "warn", "bad"]
Topic = Literal["versions", "devices", "rates", "host", "storage", "network", "variables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    topic: Topic
    """Topic of the check."""
    name: str
    """Property that was checked."""
    value: str
    """Value found."""
    expected: str | None = None
    """Expected value; None if unknown."""
    verdict: Verdict = "ok"
    """"bad" if runs fail or take twice as long; "warn" if they may."""
    fix: str | None = None
    """Advice; None if the verdict is "ok"."""
    processes: tuple[int, ...] = ()
    """Processes concerned; () for all."""

    def __post_init__(self) -> None:
        if (self.verdict == "ok") != (self.fix is None):
            accepted = "what is not ok needs a fix, and nothing else does"
            raise ConfigError(refusal("fix", self.fix, accepted))


@document("findings")
@dataclass(frozen=True, slots=True, kw_only=True)
class Findings(Tabular):
    """All findings of a machine."""

    findings: tuple[Finding, ...]
    """The findings, in order of topics."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The findings, a row for each."""
        return [{**asdict(each), "processes": [*each.processes]} for each in self.findings]


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
    """A finding with the verdict "bad" or "warn" as flagged, else "ok" without its fix."""
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
    """Whether any finding is bad."""
    return any(finding.verdict == "bad" for finding in findings)
