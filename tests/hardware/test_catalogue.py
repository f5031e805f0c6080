"""The hardware catalogue: complete, sourced, and open to a user's own files."""

import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scalejax.core.errors import ConfigError, UnknownHardware
from scalejax.core.serialization import build, plain
from scalejax.hardware import (
    Chip,
    Cluster,
    Power,
    Price,
    chip_names,
    cluster_names,
    load_attention_rates,
    load_chip,
    load_cluster,
    load_grouped_matmul_rates,
    load_matmul_table,
    with_hardware,
)
from scalejax.hardware.catalogue import CATALOGUE

FILES = sorted(CATALOGUE.glob("*/*.toml"))


def _numbers(value: object, name: str = "") -> Iterator[str]:
    """Dotted names of all numbers in a TOML document; items of a list share the list's."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, int | float):
        yield name


def _has(tables: dict, name: str) -> bool:
    """Whether a TOML document has the field of that dotted name."""
    outer, _, inner = name.partition(".")
    return outer in tables and (not inner or _has(tables[outer], inner))


def _unsourced(tables: dict) -> set[str]:
    return set(_numbers(tables)) - set(tables.get("sources", {}))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_number_of_the_catalogue_has_a_source(path: Path):
    """A number without a source cannot be checked, so none is shipped."""
    tables = tomllib.loads(path.read_text())

    assert not _unsourced(tables)
    named = ("launch_mode", "attainable.attention_rates")
    stated = {*_numbers(tables), *(name for name in named if _has(tables, name))}
    assert set(tables["sources"]) <= stated, "a source without its number"
    assert all(len(source) > 10 for source in tables["sources"].values())
    assert tables["name"] == path.stem


def test_a_number_without_source_is_noticed():
    """The test above can fail: also for a number in a table of a list."""
    tables = {"speed": 1, "parts": [{"size": 2}], "sources": {"speed": "here"}}

    assert _unsourced(tables) == {"parts.size"}


def test_catalogue_holds_what_the_documentation_names():
    """Chips and clusters that the README, the quickstart and the ledger speak of are there."""
    gpus = {"p100", "v100", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "gb200"}
    gpus |= {"h800", "b300", "gb300", "mi300x", "mi325x", "mi350x", "mi355x", "mi250x", "h20"}
    gpus |= {"l40s", "rtx-3090", "rtx-4090", "rtx-pro-6000", "rtx-pro-6000-server"}
    servers = {"dgx1-p100", "dgx1-v100", "dgx-a100", "dgx-a100-80gb", "dgx-h100", "dgx-h200"}
    racks = {"dgx-b200", "gb200-nvl72", "big-basin-goyal2017", "selene", "eos"}
    racks |= {"dgx-b300", "gb300-nvl72", "h800", "mi300x", "mi325x", "mi350x", "mi355x"}
    servers |= {"rtx3090-pcie", "rtx4090-pcie", "l40s", "rtx-pro-6000", "mi250x", "h20"}
    rented = {"aws-p4d", "aws-p5", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x", "aws-trn1"}

    assert set(chip_names()) >= gpus | {"tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x"}
    assert set(cluster_names()) >= servers | racks | rented


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_loads_and_survives_a_round_trip(name: str):
    """A cluster read, written as plain data and read again is the same cluster."""
    cluster = load_cluster(name)

    assert cluster.name == name
    assert cluster.price is None or cluster.price.date is not None
    assert build(Cluster, plain(cluster)) == cluster


@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x"])
def test_devices_of_a_tpu_share_its_way_to_the_host(name: str):
    """16 GB/s, by "How to Scale Your Model" for a chip, which JAX may see as two devices."""
    cluster = load_cluster(name)

    assert cluster.host is not None
    assert cluster.chip.tpu is not None
    assert cluster.host.bytes_per_second * cluster.chip.tpu.devices_per_chip <= 16e9


@pytest.mark.parametrize("name", chip_names())
def test_every_chip_is_physically_sensible(name: str):
    """Lower precision is never slower, and no chip is faster per clock than its units allow."""
    chip = load_chip(name)
    rates = [
        chip.peak_flop_per_second[dtype]
        for dtype in ("f32", "tf32", "bf16", "fp8", "fp4")
        if dtype in chip.peak_flop_per_second
    ]

    assert rates == sorted(rates)
    if chip.cuda is not None:
        units = chip.cuda.sm_count * chip.cuda.fpus_per_sm
        assert chip.peak_flop_per_second["f32"] == pytest.approx(
            2 * units * chip.cuda.clock_hz,
            rel=0.15,  # datasheets round: Blackwell's are 8 and 12 % above XLA's clock
        )


@pytest.mark.parametrize("name", chip_names())
def test_measured_operators_that_a_chip_names_are_there(name: str):
    """They load, are of types that the chip has, and of the form that the chip is costed by."""
    chip = load_chip(name)
    attainable = chip.attainable
    if attainable.attention_rates is not None:
        assert load_attention_rates(attainable.attention_rates).by_head_size
    if attainable.grouped_matmul_rates is not None:
        kinds = load_grouped_matmul_rates(attainable.grouped_matmul_rates).matmul_fraction
        assert set(kinds) <= set(chip.peak_flop_per_second)
    if attainable.matmul_table is not None:
        table = load_matmul_table(attainable.matmul_table)
        assert set(table.shapes) <= set(chip.peak_flop_per_second)
        assert table.form.matmul_fraction == attainable.matmul_fraction


def test_f32_products_run_as_tf32_where_the_chip_has_it():
    """XLA multiplies f32 matrices as tf32 on Ampere and later, and as f32 before."""
    assert load_chip("a100-80gb").rate_type("f32") == "tf32"
    assert load_chip("v100").rate_type("f32") == "f32"


def test_a_type_without_units_runs_as_f32():
    """V100 has no bf16 units: the compiler converts to f32; unknown types are no faster."""
    v100 = load_chip("v100")

    assert v100.rate_type("bf16") == "f16"
    assert load_chip("k80").rate_type("bf16") == "f32"
    assert v100.peak("f16") == 125e12
    assert v100.peak("s32") == v100.peak("f32")
    assert load_chip("a100-80gb").rate_type("f8e4m3fn") == "bf16"
    assert load_chip("h100").rate_type("f8e5m2") == "fp8"
    assert load_chip("h100").rate_type("f4e2m1fn") == "fp8"
    assert load_chip("b300").rate_type("f4e2m1fn") == "fp4"


def test_unknown_names_are_refused_with_the_nearest():
    """A typo in a name costs one line, and the line says what was meant."""
    with pytest.raises(UnknownHardware, match="did you mean 'dgx-h100'"):
        load_cluster("dgx-h10")
    with pytest.raises(UnknownHardware, match="did you mean 'h100'"):
        load_chip("hh100")
    with pytest.raises(UnknownHardware, match=r"no such file"):
        load_cluster("mine.toml")


OWN = """
name = "attic"
title = "Two boxes in the attic"
chip = "v100"
library = "nccl-pcie"
devices_per_node = 2
[link]
kind = "pcie"
bytes_per_second = 12e9
[network]
bytes_per_second = 1.25e9
"""


def test_own_cluster_file_names_a_catalogue_chip(tmp_path: Path):
    """A user's file needs neither sources nor a chip of its own."""
    path = tmp_path / "attic.toml"
    path.write_text(OWN)

    cluster = load_cluster(str(path))

    assert cluster.chip == load_chip("v100")
    assert cluster.network is not None
    assert cluster.network.bytes_per_second == 1.25e9


def test_own_cluster_file_may_describe_its_chip_in_place(tmp_path: Path):
    """A chip that the catalogue lacks is a [chip] table in the cluster's file."""
    path = tmp_path / "attic.toml"
    chip = (CATALOGUE / "chips" / "p100.toml").read_text().replace('"p100"', '"mine"')
    tables = chip.replace("[", "[chip.").replace("= [chip.", "= [")
    path.write_text(OWN.replace('chip = "v100"\n', "") + "[chip]\n" + tables)

    assert load_cluster(str(path)).chip.name == "mine"


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("kind = 'pci'", 'kind = "pcie"', r"link\.kind='pci' is refused.*did you mean 'pcie'"),
        ("bytes_per_second = -1", "bytes_per_second = 12e9", r"link\.bytes_per_second=-1"),
        ("devices_per_nod = 2", "devices_per_node = 2", "did you mean 'devices_per_node'"),
    ],
)
def test_damaged_cluster_file_is_refused(tmp_path: Path, wrong: str, right: str, message: str):
    """Field, value and what is accepted, in one line."""
    path = tmp_path / "attic.toml"
    path.write_text(OWN.replace(right, wrong))

    with pytest.raises(ConfigError, match=message):
        load_cluster(str(path))


@pytest.mark.parametrize(
    ("owner", "changes", "field"),
    [
        ("cuda", {"sm_count": -1}, r"cuda\.sm_count=-1"),
        ("cuda", {"clock_hz": math.nan}, r"cuda\.clock_hz=nan"),
        ("residuals", {"compute": 1e308}, r"residuals\.compute=1e\+308"),
        ("attainable", {"launch_seconds": 1e300}, r"attainable\.launch_seconds=1e\+300"),
        ("", {"memory_bytes": 2**62}, r"memory_bytes=4611686018427387904"),
    ],
)
def test_a_chip_that_cannot_be_is_refused(owner: str, changes: dict[str, float], field: str):
    """Negative, not finite, or larger than any."""
    chip = load_chip("h100")

    with pytest.raises(ConfigError, match=f"^{field} is refused"):
        replace(getattr(chip, owner) if owner else chip, **changes)


@pytest.mark.parametrize(
    ("build_it", "message"),
    [
        (lambda: Price(dollars_per_device_hour=0, date="2025"), "^price.dollars_per_device_hour=0"),
        (lambda: Price(dollars_per_device_hour=2, date="May 2025"), '^price.date=.*"2025-10-22"'),
        (lambda: Price(dollars_per_device_hour=2, date="2025-13"), "^price.date="),
        (lambda: Power(max_watts=0), "^power.max_watts=0"),
        (lambda: Power(max_watts=900, training_watts=1000), "^power.training_watts=1000.*max"),
        (lambda: Power(pue=0.9), r"^power\.pue=0\.9"),
    ],
)
def test_prices_and_watts_that_cannot_be_are_refused(build_it: Callable[[], object], message: str):
    """A device that costs nothing, days that are none, more watts than the most."""
    with pytest.raises(ConfigError, match=message):
        build_it()


def test_energy_is_of_what_was_measured_in_training_or_else_of_the_most():
    """A rating is an upper bound, and better than nothing."""
    assert Power(max_watts=1000, training_watts=700).watts == 700
    assert Power(max_watts=1000).watts == 1000
    assert Power(idle_watts=100).watts is None


def test_a_node_of_more_devices_than_there_are_is_refused():
    """It ended in a traceback, of a number too large."""
    with pytest.raises(ConfigError, match=r"^devices_per_node=.* from 0 to 1e\+06"):
        replace(load_cluster("dgx-h100"), devices_per_node=2**62)


def test_own_file_with_an_unknown_chip_is_refused(tmp_path: Path):
    """The chip that a file names is looked up in the catalogue."""
    path = tmp_path / "attic.toml"
    path.write_text(OWN.replace("v100", "v10"))

    with pytest.raises(UnknownHardware, match="did you mean 'v100'"):
        load_cluster(str(path))


def test_a_chip_without_an_f32_rate_is_refused():
    """Every type falls back on f32, so a chip must have it."""
    tables = plain(load_chip("h100"))
    assert isinstance(tables, dict)
    rates = tables["peak_flop_per_second"]
    assert isinstance(rates, dict)
    del rates["f32"]

    with pytest.raises(ConfigError, match="it must hold f32"):
        build(Chip, tables)


# --- clusters that are others with differences ---


def based(folder: Path, name: str, text: str) -> str:
    """The path of a cluster file that was written there."""
    (folder / f"{name}.toml").write_text(text)
    return str(folder / f"{name}.toml")


def test_a_file_based_on_a_cluster_says_only_what_is_different(tmp_path: Path):
    """All else is inherited, tables are merged, and the source of a replaced number goes."""
    path = based(tmp_path, "twice", 'based_on = "dgx-h100"\n[network]\nbytes_per_second = 800e9\n')

    cluster, base = load_cluster(path), load_cluster("dgx-h100")

    assert base.network is not None
    network = replace(base.network, bytes_per_second=800e9)
    sources = {k: v for k, v in base.sources.items() if k != "network.bytes_per_second"}
    title = "twice, based on dgx-h100"
    assert cluster == replace(base, name="twice", title=title, network=network, sources=sources)


def test_what_is_based_on_a_file_that_is_based_on_another_has_all_differences(tmp_path: Path):
    """Paths are relative to the file that has them; another chip takes its price and power along,
    a table of the chip replaces fields of it."""
    (tmp_path / "below").mkdir()
    based(tmp_path / "below", "one", 'based_on = "dgx-h100"\ndevices_per_node = 16\n')
    two = based(
        tmp_path,
        "two",
        'based_on = "below/one.toml"\nname = "b"\n[chip]\nmemory_bytes = 100_000_000_000\n',
    )
    three = based(tmp_path, "three", 'based_on = "two.toml"\nchip = "b200"\n')

    assert load_cluster(two).name == "b"
    assert load_cluster(two).devices_per_node == 16
    assert load_cluster(two).chip == replace(load_chip("h100"), memory_bytes=100_000_000_000)
    assert load_cluster(two).price == load_cluster("dgx-h100").price
    assert load_cluster(three).chip == load_chip("b200")
    assert load_cluster(three).devices_per_node == 16
    assert load_cluster(three).price is None
    assert "price.dollars_per_device_hour" not in load_cluster(three).sources


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": 'based_on = "a.toml"'}, r"based_on='a\.toml'.* on this file itself"),
        ({"a": 'based_on = "b.toml"', "b": 'based_on = "a.toml"'}, "through a.toml and b.toml"),
        ({"a": 'based_on = "dgx-h10"'}, "based_on='dgx-h10'.*did you mean 'dgx-h100'"),
        ({"a": 'based_on = "b.toml"'}, "based_on=.*there is no such file"),
        ({"a": "based_on = 3"}, "based_on=3 is refused: it must be the name"),
        ({"a": 'based_on = "dgx-h100"\n[network]\nbytes = 3'}, "network.bytes is not a field"),
    ],
)
def test_what_cannot_be_a_base_is_refused(tmp_path: Path, files: dict[str, str], message: str):
    """Circles, names and files that are none, and fields that nothing has."""
    for name, text in files.items():
        based(tmp_path, name, text)

    with pytest.raises((ConfigError, UnknownHardware), match=message):
        load_cluster(str(tmp_path / "a.toml"))


def test_parts_of_a_cluster_are_replaced_by_values_or_multiples():
    """The title says so; a field that was not there is added."""
    cluster = load_cluster("dgx-h100")
    assert cluster.network is not None

    found = with_hardware(
        cluster,
        {
            "network.bytes_per_second": "2x",
            "chip.peak_flop_per_second.bf16": "1.5x",
            "cluster.max_device_count": 64,
            "power.pue": 1.3,
        },
    )

    assert found.network == replace(cluster.network, bytes_per_second=800e9)
    assert found.chip.peak("bf16") == 1.5 * cluster.chip.peak("bf16")
    assert found.max_device_count == 64
    assert found.power is not None
    assert found.power.pue == 1.3
    assert found.title.endswith(
        "network.bytes_per_second 2x, chip.peak_flop_per_second.bf16 1.5x, "
        "cluster.max_device_count 64, power.pue 1.3"
    )
    assert with_hardware(cluster, {}) is cluster


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("network.bytes_per_secon", 1, "did you mean 'bytes_per_second'"),
        ("network.bytes_per_second", "400Gb/s", "a multiple of it, such as 2x"),
        ("network.bytes_per_second", "0x", "bytes per second, and must be at least 1e6"),
        ("link.kind", "2x", "it is 'nvswitch' there, which has no multiple"),
        ("cluster.max_device_count", "2x", "there is none, which has no multiple"),
        ("network.x.y", 1, r"network\.x"),
        ("network.nodes_per_switch", "2x", r"^dgx-h100: network\.nodes_per_switch=.*there is none"),
    ],
)
def test_a_part_that_a_cluster_cannot_have_is_refused(name: str, value: int | str, message: str):
    """Field, value and what is accepted."""
    with pytest.raises(ConfigError, match=message):
        with_hardware(load_cluster("dgx-h100"), {name: value})
