"""What software makes of a chip: by hand, and what is kept of each framework."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hardware_cases import CHIP

from scalejax.core.errors import ConfigError
from scalejax.hardware import chip_names
from scalejax.simulator.frameworks import FRAMEWORKS, Framework, Software
from scalejax.simulator.frameworks import software as software_module
from scalejax.simulator.frameworks.software import Rates, software_by_name
from scalejax.simulator.operations.roofline import attention_share

FILE = Path(software_module.__file__).with_name("software.toml")
TABLES: dict[str, dict[str, Any]] = tomllib.loads(FILE.read_text())
ATTAINABLE = replace(
    CHIP.attainable,
    sustained_fraction=0.8,
    convolution_fraction=0.6,
    memory_fraction=0.9,
    launch_seconds=1e-6,
    attention_fraction=0.5,
    attention_by_shape=((4096, 128, 0.7),),
    contention_fraction=0.2,
    step_cv=0.01,
    step_dispersion_seconds=1e-5,
)
HEADS = (1, 4096, 4096, 128)


def test_rates_scale_those_of_a_chip_and_add_to_its_times():
    """Shares multiply fractions, gaps add to launches; what is not given stays the chip's."""
    rates = Rates(
        matmul_share=0.5,
        attention_share=0.5,
        convolution_share=0.5,
        memory_share=0.5,
        gap_seconds=9e-6,
        dispatch_seconds=3e-6,
        collective_dispatch_seconds=5e-6,
        member_dispatch_seconds=6e-6,
        step_overhead_seconds=4e-3,
    )
    chip = replace(ATTAINABLE, dispatch_seconds=1e-6, step_overhead_seconds=1e-3)

    made = rates.on(chip)

    times = (made.launch_seconds, made.dispatch_seconds, made.step_overhead_seconds)
    assert times == pytest.approx((10e-6, 4e-6, 5e-3))
    assert made == replace(
        chip,
        sustained_fraction=0.4,
        attention_scale=0.5,
        convolution_fraction=0.3,
        memory_fraction=0.45,
        launch_seconds=made.launch_seconds,
        dispatch_seconds=made.dispatch_seconds,
        collective_dispatch_seconds=5e-6,
        member_dispatch_seconds=6e-6,
        step_overhead_seconds=made.step_overhead_seconds,
    )
    assert attention_share(HEADS, made) == 0.35
    halved = rates.on(replace(chip, convolution_f32_fraction=0.4))
    assert halved.convolution_f32_fraction == 0.2
    assert Rates().on(chip) == chip


def test_rates_replace_how_steps_vary_and_what_compute_loses():
    """Where they are given, 0 as well."""
    rates = Rates(
        contention_fraction=0.9,
        step_cv=0.0,
        step_dispersion_seconds=2e-3,
        dispersed_from_seconds=0.1,
    )

    assert rates.on(ATTAINABLE) == replace(
        ATTAINABLE,
        contention_fraction=0.9,
        step_cv=0.0,
        step_dispersion_seconds=2e-3,
        dispersed_from_seconds=0.1,
    )


@pytest.mark.parametrize("measured", [{}, {"attention_rates": "h100"}])
def test_an_attention_kernel_of_its_own_has_one_rate_for_all_shapes(measured: dict[str, Any]):
    """In place of what was measured of the chip's."""
    chip = replace(ATTAINABLE, **measured)
    made = Rates(attention_fraction=0.3, attention_share=0.5).on(chip)

    assert attention_share(HEADS, made) == attention_share((8, 64, 64, 64), made) == 0.15
    assert attention_share(HEADS, chip) > 0.3


def test_no_rate_is_above_the_peak():
    """However much faster than XLA's kernels a framework's are."""
    made = Rates(matmul_share=2.0, attention_share=2.0, convolution_share=2.0, memory_share=2.0).on(
        ATTAINABLE
    )

    assert made.sustained_fraction == made.convolution_fraction == made.memory_fraction == 1.0
    assert attention_share(HEADS, made) == 1.0


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [("memory_share", 0.0, "above 0"), ("gap_seconds", -1e-6, "0"), ("step_cv", -0.1, "0")],
)
def test_rates_out_of_range_are_refused(field: str, value: float, accepted: str):
    """Shares are above 0; times and fractions are not below."""
    given: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=f"{field}={value} is refused.*{accepted}"):
        Rates(**given)


def test_a_chip_has_rates_of_its_own_where_a_framework_was_measured_on_it():
    """Or else those of any chip; a framework that nobody measured has what is typical of others,
    and a wider band than most."""
    software = Software(gap_seconds=1e-6, on_chip={"paper": Rates(gap_seconds=2e-6)})
    other = replace(CHIP, name="other")

    assert software.applied(CHIP).attainable.launch_seconds == 2e-6
    assert software.applied(other).attainable.launch_seconds == 1e-6
    unknown = Framework(name="ours", title="Ours", year=2026).software
    fitted = [each for name, each in software_by_name().items() if name != "unknown"]
    for name in ("matmul_share", "memory_share", "gap_seconds"):
        kept = [getattr(each, name) for each in fitted]
        assert min(kept) < getattr(unknown, name) < max(kept)
    assert unknown.residual is not None
    assert unknown.residual > np.median([each.residual or 0.0 for each in fitted])


def test_what_a_table_of_a_chip_leaves_out_is_that_of_any(tmp_path: Path, monkeypatch):
    """Of rates alone."""
    file = tmp_path / "software.toml"
    file.write_text(
        "[ours]\ngap_seconds = 1e-6\nmemory_share = 0.5\nresidual = 0.1\nrows = {h100 = 3}\n"
        "[ours.on_chip.h100]\ngap_seconds = 2e-6\n"
    )
    monkeypatch.setattr(software_module, "_FILE", file)

    ours = software_by_name.__wrapped__()["ours"]

    assert ours.rates_on("h100") == Rates(gap_seconds=2e-6, memory_share=0.5)
    assert (ours.rates_on("a100").gap_seconds, ours.residual, ours.rows) == (1e-6, 0.1, {"h100": 3})


@pytest.mark.parametrize("name", TABLES)
def test_software_that_is_kept_is_of_a_framework_and_of_known_chips(name: str):
    """And each of its rates is what its table says, or that of any chip."""
    table, read = TABLES[name], software_by_name()[name]
    assert name in {*FRAMEWORKS, "unknown"}  # of frameworks without a table

    on_chip = table.get("on_chip", {})
    assert {*on_chip, *table.get("rows", {})} <= set(chip_names())
    assert set(read.on_chip) == set(on_chip)
    for each in fields(Rates):
        pooled = table.get(each.name, getattr(Rates(), each.name))
        assert getattr(read, each.name) == pooled
        for chip, changes in on_chip.items():
            assert getattr(read.rates_on(chip), each.name) == changes.get(each.name, pooled)
