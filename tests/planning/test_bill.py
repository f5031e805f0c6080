"""What a run costs, by hand."""

from dataclasses import replace

import pytest

from scalejax.core.errors import ConfigError
from scalejax.hardware import load_cluster, with_hardware
from scalejax.planning.bill import Bill, Rates, bill, of_other_dates, rates_of, updates_for


def test_a_bill_is_arithmetic_that_can_be_done_by_hand():
    """64 devices for two days are 3,072 device-hours; at 1 kW and 1.25 over the machines that is
    3,840 kWh, and at 500 g a kWh 1,920 kg."""
    rates = Rates(
        price_per_device_hour=2.5, watts_per_device=1000.0, pue=1.25, grid_grams_per_kwh=500.0
    )

    found = bill(2 * 86400.0, 64, rates)

    assert found == Bill(
        device_hours=3072.0, price=7680.0, energy_joules=3840 * 3.6e6, co2_kilograms=1920.0
    )
    assert bill(3600.0, 1, Rates()) == Bill(
        device_hours=1.0, price=None, energy_joules=None, co2_kilograms=None
    )


def test_updates_train_on_all_tokens():
    """300e9 tokens in batches of 512 x 2,048 are 286,102.3 updates: one more than whole ones."""
    assert updates_for(300e9, 512, 2048) == 286_103
    assert updates_for(2**20, 512, 2048) == 1


def test_rates_are_those_given_or_those_of_the_file():
    """Own watts have the cooling in them, so that the file's PUE does not count twice."""
    cluster = load_cluster("aws-p5")
    assert cluster.price is not None
    assert cluster.power is not None

    of_file = rates_of(cluster)
    own = rates_of(cluster, price_per_device_hour=2.0, watts_per_device=1500.0)

    assert of_file.price_per_device_hour == cluster.price.dollars_per_device_hour
    assert (of_file.watts_per_device, of_file.pue) == (cluster.power.training_watts, 1.15)
    assert own == Rates(price_per_device_hour=2.0, watts_per_device=1500.0)
    assert rates_of(replace(cluster, price=None, power=None)) == Rates()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"price_per_device_hour": -1.0}, "^price=-1"),
        ({"watts_per_device": 0.0}, "^watts=0"),
        ({"pue": 0.9}, r"^pue=0\.9"),
        ({"grid_grams_per_kwh": -1.0}, "^grid_intensity=-1"),
    ],
)
def test_rates_that_nothing_has_are_refused(fields: dict[str, float], message: str):
    """By the names of their flags."""
    with pytest.raises(ConfigError, match=message):
        Rates(**fields)


def test_list_prices_of_other_dates_are_told_apart():
    """The cheaper may be only the later; of one date, or of one's own price, nothing is said."""
    dated = [load_cluster(name) for name in ("dgx-h100", "dgx-h200", "dgx1-v100")]
    own = with_hardware(dated[1], {"price.dollars_per_device_hour": 3.0})

    (warning,) = of_other_dates(dated)

    assert "(dgx-h100 2026-05-18, dgx-h200 2025-10-22)" in warning
    assert of_other_dates([dated[0], dated[0], dated[2]]) == of_other_dates([dated[0], own]) == []
