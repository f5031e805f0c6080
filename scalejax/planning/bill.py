"""What a run costs: device-hours, dollars, energy and CO2, from its seconds and its devices.

Arithmetic on numbers, shared by plans, costs and pages; knows neither predictions nor files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_least,
    require_at_most,
)
from scalejax.hardware import Cluster

HOUR_SECONDS = 3600.0
MWH_JOULES = 3.6e9
KWH_JOULES = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What an hour of a device costs; None where it is unknown."""

    price_per_device_hour: float | None = None
    """Price of an hour of one device, in any currency."""
    watts_per_device: float | None = None
    """Power of a device with its share of host and network, and of cooling where `pue` is None."""
    pue: float | None = None
    """Power of the whole data centre over that of its machines; None if unknown, or already
    included in the watts."""
    grid_grams_per_kwh: float | None = None
    """Grams of CO2 per kWh of electricity."""

    def __post_init__(self) -> None:
        require_at_least("price", self.price_per_device_hour, 0)
        require_above("watts", self.watts_per_device, 0)
        require_at_least("pue", self.pue, 1)
        require_at_most("pue", self.pue, 10)
        require_at_least("grid_intensity", self.grid_grams_per_kwh, 0)
        require_at_most("grid_intensity", self.grid_grams_per_kwh, 1e4)
        if self.grid_grams_per_kwh is not None and 0 < self.grid_grams_per_kwh < 1:
            accepted = (
                f"it is grams of CO2 for a kWh, and no grid emits so few: "
                f"{self.grid_grams_per_kwh:g} kg is {1000 * self.grid_grams_per_kwh:g}"
            )
            raise ConfigError(refusal("grid_intensity", self.grid_grams_per_kwh, accepted))


NO_RATES = Rates()
"""Rates that are all unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a run costs; None where a rate is unknown."""

    device_hours: float
    """Hours of one device."""
    price: float | None
    """Device-hours times the price of one, in its currency."""
    energy_joules: float | None
    """Energy of all devices, with cooling if it is known."""
    co2_kilograms: float | None
    """CO2 of that energy."""


def rates_of(
    cluster: Cluster,
    *,
    price_per_device_hour: float | None = None,
    watts_per_device: float | None = None,
    pue: float | None = None,
    grid_grams_per_kwh: float | None = None,
) -> Rates:
    """The rates of a cluster: those given, and the others from its file.

    Args:
        cluster: the hardware, with list price, watts and PUE as far as these are known.
        price_per_device_hour: a price that replaces the list price.
        watts_per_device: a power that replaces the file's; it includes cooling unless `pue` is
            given too.
        pue: power of the data centre over that of its machines, in place of the file's.
        grid_grams_per_kwh: CO2 of the electricity.
    """
    power = cluster.power
    if pue is None and watts_per_device is None and power is not None:
        pue = power.pue
    if price_per_device_hour is None and cluster.price is not None:
        price_per_device_hour = cluster.price.dollars_per_device_hour
    if watts_per_device is None and power is not None:
        watts_per_device = power.watts
    return Rates(
        price_per_device_hour=price_per_device_hour,
        watts_per_device=watts_per_device,
        pue=pue,
        grid_grams_per_kwh=grid_grams_per_kwh,
    )


def of_other_dates(clusters: Sequence[Cluster]) -> list[str]:
    """A warning if the list prices of these clusters are of different dates."""
    dated = {each.name: each.price.date for each in clusters if each.price and each.price.date}
    if len(set(dated.values())) < 2:
        return []
    of_dates = ", ".join(f"{name} {date}" for name, date in dated.items())
    return [
        f"LIST PRICES ARE OF OTHER DATES ({of_dates}), so that the cheaper may be only the later: "
        "--price P,P,... gives prices of one day"
    ]


def device_hours(seconds: float, device_count: int) -> float:
    """Device-hours of a run of `seconds` on `device_count` devices."""
    return seconds / HOUR_SECONDS * device_count


def bill(seconds: float, device_count: int, rates: Rates) -> Bill:
    """What `device_count` devices cost for `seconds`."""
    hours = device_hours(seconds, device_count)
    price, watts, grams = (
        rates.price_per_device_hour,
        rates.watts_per_device,
        rates.grid_grams_per_kwh,
    )
    joules = None if watts is None else watts * (rates.pue or 1.0) * hours * HOUR_SECONDS
    return Bill(
        device_hours=hours,
        price=None if price is None else hours * price,
        energy_joules=joules,
        co2_kilograms=(
            None if joules is None or grams is None else joules / KWH_JOULES * grams / 1000
        ),
    )


def updates_for(tokens: float, global_batch: int, tokens_per_sample: int = 1) -> int:
    """Updates that train on at least `tokens` tokens, or on as many samples of one token each."""
    return max(1, math.ceil(tokens / (global_batch * tokens_per_sample)))
