"""The page to play with: it shows what `predict` says, in a browser as on paper."""

import json
import math
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Tab, chromium

import scalejax
from scalejax import load_cluster
from scalejax import predict as predict_verb
from scalejax.cli.main import main, split_overrides
from scalejax.config.run import RunConfig, published_run
from scalejax.core.errors import ConfigError
from scalejax.core.progress import OnProgress
from scalejax.core.units import parse_count
from scalejax.data.facts import resolve
from scalejax.hardware import Chip, Cluster, with_hardware
from scalejax.planning import settings_grid as planned
from scalejax.planning.bill import bill, rates_of, updates_for
from scalejax.planning.search.run import search_run
from scalejax.planning.settings_grid import with_network
from scalejax.report.html.explorer import cluster_table
from scalejax.simulator.predict import Prediction, predict
from scalejax.simulator.program import Program
from scalejax.simulator.transformer import transformer_program
from scalejax.xla import batch as compiling
from scalejax.xla.closed_form import (
    installed_compiler,
    program_in_closed_form,
    shape_of,
    strategy_of,
    workspace_bytes,
)
from scalejax.xla.derive import ProfileJob
from scalejax.xla.job import RunJob

SCRIPTS = Path(scalejax.__file__).parent / "report" / "html"
NODE = shutil.which("node")
SETTINGS = 200
GRID, PRICE = 'input[max="10000"]', 'input[max="1000000"]'
"""Fields of CO2 and of the first price."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of GPT-2's smallest size on two clusters; eight steps are compiled, in 40 s."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    options = (
        "--cluster dgx-h100,dgx-a100 --devices 8,16 --batches 32,64 --networks 0.5,1 "
        "--precisions bfloat16 --layouts 3 --tokens 2.5B --price 2,1.5 --grid-intensity 400"
    )
    assert main(["page", "gpt2-124m", *options.split(), "--output", str(path)]) == 0
    return path


def data_of(page: Path) -> dict:
    """The table in a page."""
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def random_settings(data: dict) -> list[dict]:
    """Settings of the controls, with any tokens and prices, drawn once and for all."""
    draw = random.Random(27)
    return [
        {
            "cluster": draw.choice(data["clusters"])["name"],
            "devices": draw.choice(data["devices"]),
            "batch": draw.choice(data["batches"]),
            "precision": draw.choice(data["dtypes"]),
            "network": draw.choice(data["networks"]),
            "framework": draw.choice(data["frameworks"])["name"],
            "tokens": round(10 ** draw.uniform(8, 13)),
            "layout": draw.choice([None, *(each["words"] for each in data["layouts"])]),
            "prices": draw.choice([{}, {"dgx-h100": 3.25, "dgx-a100": 0.75}]),
            "grid": draw.choice([None, 400]),
        }
        for _ in range(SETTINGS)
    ]


def config_of(flags: str, precision: str, batch: int) -> RunConfig:
    """The run of the flags of a layout."""
    _, fields = split_overrides(flags.split())
    fields |= {"model.compute_dtype": precision, "batch.global_batch": batch}
    return published_run("gpt2-124m", fields)


@cache
def predicted(
    flags: str, precision: str, batch: int, name: str, network: float, count: int, framework: str
) -> Prediction:
    """What `predict` says of a setting and the flags of its layout, from the run file on."""
    cluster = with_network(load_cluster(name), network)
    assert cluster is not None
    config = config_of(flags, precision, batch)
    return predict_verb(config, cluster, count, framework=framework)


def closed_form_of(config: RunConfig, cluster: Cluster, devices: int) -> Prediction:
    """The prediction of a run as XLA runs it, without a compiler."""
    shape = shape_of(config, cluster.chip, compiler=installed_compiler())
    workspace = workspace_bytes(cluster.chip)
    strategy = strategy_of(resolve(config, devices))
    return predict(transformer_program(shape, strategy, workspace_bytes=workspace), cluster)


def require_equal(data: dict, settings: list[dict], shown: list[dict]) -> None:
    """Time, band, memory and costs of every setting that the page answered are the simulator's."""
    origins: Counter[str] = Counter()
    for setting, answer in zip(settings, shown, strict=True):
        if "refused" in answer:
            continue
        names = ("precision", "batch", "cluster", "network", "devices", "framework")
        own = predicted(answer["flags"], *(setting[each] for each in names))
        origins[answer["origin"]] += 1
        cluster = load_cluster(setting["cluster"])
        listed = next(e["price"] for e in data["clusters"] if e["name"] == setting["cluster"])
        price = setting["prices"].get(setting["cluster"], listed)
        rates = rates_of(cluster, price_per_device_hour=price, grid_grams_per_kwh=setting["grid"])
        updates = updates_for(setting["tokens"], setting["batch"], data["tokensPerSample"])
        costs = bill(updates * own.step_seconds, setting["devices"], rates)
        expected = {
            "days": updates * own.step_seconds / 86_400,
            "lowDays": own.p10_step_seconds and updates * own.p10_step_seconds / 86_400,
            "highDays": own.p90_step_seconds and updates * own.p90_step_seconds / 86_400,
            "peakBytes": own.peak_memory_bytes,
            "dollars": costs.price,
            "mwh": costs.energy_joules and costs.energy_joules / 3.6e9,
            "kilograms": costs.co2_kilograms,
            "mfu": own.mfu,
        }
        # The table holds six digits, of MFU four.
        assert {name: answer[name] for name in expected} == pytest.approx(expected, rel=1e-3)
        assert answer["fits"] == own.fits
        parts = math.fsum(each["seconds"] for each in answer["waterfall"])
        assert parts == pytest.approx(answer["step"], rel=1e-3)
    assert origins.keys() == {"compiled", "kernels"}
    assert min(origins.values()) > SETTINGS // 4


ANSWERS = """settings.map((setting) => {
  const found = answers.answer(data, setting);
  return found.chosen || { refused: found.refused };
})"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None and NODE is None, reason="no browser and no Node")
def test_the_page_says_what_predict_says_at_random_settings(
    page: Path, monkeypatch: pytest.MonkeyPatch
):
    """Makes a page (40 s). In a browser where there is one, and else in Node: 200 settings, each
    predicted anew from the flags that the page shows, as its framework runs it: XLA's compiled."""
    data = data_of(page)
    settings = random_settings(data)

    def refuse(jobs: Sequence[RunJob], *_: object) -> None:
        raise AssertionError(f"predict compiles another step than the page: {jobs}")

    # Those of the page are in the cache.
    monkeypatch.setattr(compiling, "run_jobs", refuse)
    if CHROMIUM is not None:
        with chromium() as tab:
            tab.open(page.as_uri(), 1400, 900)
            read = 'JSON.parse(document.getElementById("data").textContent)'
            shown = tab.value(f"((data, settings) => {ANSWERS})({read}, {json.dumps(settings)})")
    else:
        shown = in_node(f"((data, settings) => {ANSWERS})(input.data, input.settings)",
                        {"data": data, "settings": settings})  # fmt: skip
    require_equal(data, settings, shown)


@pytest.mark.slow
def test_the_best_layout_of_the_page_is_that_of_search(page: Path):
    """Makes a page (40 s). It goes through fewer, and finds one within 2 % on either cluster."""
    data = data_of(page)
    for place, cluster in enumerate(("dgx-h100", "dgx-a100")):
        found = search_run(
            published_run("gpt2-124m", {"batch.global_batch": 64}), load_cluster(cluster), (16,)
        )
        at = data["networks"].index(1), data["frameworks"].index(
            next(each for each in data["frameworks"] if each["name"].startswith("xla"))
        )  # fmt: skip
        best = data["cells"][f"{place},1,1,0,{at[0]},{at[1]}"][0]
        config = config_of(data["layouts"][best[0]]["flags"], "bfloat16", 64)
        own = closed_form_of(config, load_cluster(cluster), 16)
        assert own.step_seconds < 1.02 * found.ranked[0].step_seconds


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)])
def test_the_page_works_in_a_browser(page: Path, width: int, height: int):
    """Makes a page (40 s). No error; days, dollars and "does it fit" are seen without scrolling;
    keys move sliders and open sources; the address holds the setting."""
    with chromium() as tab:
        tab.open(page.as_uri(), width, height)
        assert tab.value("document.documentElement.scrollWidth") <= width
        bottom = tab.value("document.getElementById('cards').getBoundingClientRect().bottom")
        assert bottom < height
        words = tab.value("document.querySelector('header').innerText")
        assert re.search(r"(min|hours|days) and \$[\d.,]+", words)
        assert "it fits" in words
        before = tab.value("document.querySelector('input[type=range]').value")
        tab.value("document.querySelector('input[type=range]').focus()")
        tab.key("ArrowRight" if before == "0" else "ArrowLeft")
        devices = 16 if before == "0" else 8
        assert f"on {devices} H100" in tab.value("document.getElementById('verdict').innerText")
        assert tab.value("location.hash") in (f"#devices={devices}", "#")
        tab.value("document.querySelector('.card button').focus()")
        tab.key("Enter")
        said = tab.value("document.getElementById('why').innerText")
        assert "updates = ceil(tokens / (global batch" in said
        tab.key("Escape")
        assert tab.value("document.getElementById('why').open") is False
        tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        tab.value("document.querySelector('#map circle:last-of-type').focus()")
        assert re.search(r"step .*s, .*\n.* GiB", tab.value("tip.innerText"))
        tab.key("Enter")
        assert "layout=" in tab.value("location.hash")
        again = f"{page.as_uri()}#cluster=dgx-a100&devices=16&batch=32&tokens=1e9"
        tab.open(again, width, height, is_dark=True)
        verdict = tab.value("document.getElementById('verdict').innerText")
        assert "on 16 A100-40GB (dgx-a100)" in verdict
        assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
        tab.call("Emulation.setEmulatedMedia", media="print")
        assert tab.value("getComputedStyle(document.querySelector('aside')).display") == "none"
        assert tab.complaints == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_closed_forms_beside_compiled_steps_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Costs a page (10 s). Those of the cluster whose compiler is missing, in the table and in the
    break-even too; and that compiler is named as the reason of its steps alone."""

    def missing(chip: Chip) -> str | None:
        return "GPUs" if chip.name.startswith("a100") else None

    def made(jobs: Sequence[ProfileJob], _: OnProgress) -> list[Program]:
        return [program_in_closed_form(each) for each in jobs]

    monkeypatch.setattr(planned, "_missing_compiler", missing)
    monkeypatch.setattr(planned, "profile_each", made)
    path = tmp_path / "page.html"
    options = "--devices 8 --batches 32 --networks 1 --precisions bfloat16 --layouts 2"
    clusters = "dgx-h100,dgx-a100"
    arguments = ["gpt2-124m", "--cluster", clusters, *options.split(), "--output", str(path)]
    assert main(["page", *arguments]) == 0

    assert [each["whyNotCompiled"] for each in data_of(path)["clusters"]] == [
        None,
        "no compiler for GPUs is installed",
    ]
    with chromium() as tab:
        tab.open(path.as_uri(), 1400, 900)
        rows = tab.value("document.getElementById('table').innerText").split("\n")
        of_chip = {name: [each for each in rows if name in each] for name in clusters.split(",")}
        mark = "closed form, not compiled"
        assert [mark in each for each in of_chip["dgx-a100"]] == [True]
        assert [mark in each for each in of_chip["dgx-h100"]] == [False]
        assert mark in tab.value("document.getElementById('even').innerText")
        assert mark not in tab.value("document.getElementById('cards').innerText")
        tab.open(f"{path.as_uri()}#cluster=dgx-a100", 1400, 900)
        assert mark in tab.value("document.getElementById('cards').innerText")
        assert tab.complaints == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_an_address_holds_the_setting_whatever_it_was(page: Path):
    """Makes a page (40 s). CO2 is that of the command until it is cleared, which the address says;
    a layout that the setting has not is dropped from address and menu."""
    with chromium() as tab:
        tab.open(page.as_uri(), 1400, 900)
        assert tab.value(f"document.querySelector('{GRID}').value") == "400"
        assert " t CO2" in tab.value("document.getElementById('cards').innerText")
        type_in(tab, GRID, "")
        cleared = tab.value("location.href")
        assert cleared.endswith("#grid=")
        tab.open(cleared, 1400, 900)
        assert "CO2" not in tab.value("document.getElementById('cards').innerText")
        type_in(tab, GRID, "50")
        assert tab.value("location.hash") == "#grid=50"
        tab.value("[...document.querySelectorAll('form button')].find((each) => "
                  "each.innerText === 'Reset').click()")  # fmt: skip
        assert " t CO2" in tab.value("document.getElementById('cards').innerText")
        tab.open(f"{page.as_uri()}#devices=8&layout=nosuch", 1400, 900)
        assert tab.value("location.hash") == "#devices=8"
        assert tab.value("document.querySelectorAll('select')[1].selectedOptions[0].text"
                         ).startswith("best")  # fmt: skip
        assert tab.complaints == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_no_price_and_no_tokens_stop_the_page(page: Path):
    """Makes a page (40 s). What has no place on a logarithm is not drawn; all else is."""
    free = "price.dgx-h100=0&price.dgx-a100=0"
    cases = {
        "price.dgx-h100=0": True,
        free: False,
        free.replace("h100=0", "h100=1e-320"): False,
        "tokens=1e300&price.dgx-h100=1e300": True,
        "tokens=1e18&price.dgx-h100=1000000": True,
    }
    with chromium() as tab:
        for setting, is_drawn in cases.items():
            tab.open(f"{page.as_uri()}#{setting}", 1400, 900)
            drawn = tab.value("document.querySelectorAll('#cost circle').length")
            assert (drawn > 0) == is_drawn
            assert tab.value("document.querySelectorAll('#map circle').length") > 0
            assert tab.value("document.querySelectorAll('#table tr').length") == 5
            shown = tab.value("document.querySelector('.page').innerHTML")
            assert not re.search(r"NaN|Infinity|∞|undefined", shown)
        assert tab.complaints == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_what_is_typed_is_taken_or_refused_in_words(page: Path):
    """Makes a page (40 s). The field of tokens reads what the command does, and says what it does
    not; so do those of prices and CO2."""
    field = "input[type=text]"
    with chromium() as tab:
        tab.open(page.as_uri(), 1400, 900)
        for text, tokens in (("300_000", "300000"), ("1g", "1000000000"), (" 7B ", "7000000000")):
            type_in(tab, field, text)
            assert tab.value("location.hash") == f"#tokens={tokens}"
        for text in ("1,5B", "3e11 bananas", "1e19", "0", "-3", ""):
            type_in(tab, field, text)
            assert tab.value("location.hash") == "#tokens=7000000000"
            assert tab.value(f"document.querySelector('{field}').ariaInvalid") == "true"
            assert "Refused" in tab.value("document.querySelector('[role=alert]').innerText")
        type_in(tab, field, "1e18")
        assert tab.value(f"document.querySelector('{field}').value") == "1000000T"
        assert tab.value("document.querySelector('[role=alert]').innerText") == ""
        type_in(tab, PRICE, "-1")
        assert "a price must be" in tab.value("document.querySelector('form').innerText")
        type_in(tab, GRID, "20000")
        assert "0 to 10,000" in tab.value("document.querySelector('form').innerText")
        assert tab.value("location.hash") == "#tokens=1000000000000000000"
        assert tab.complaints == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_a_phone_keeps_the_verdict_in_sight_and_keys_their_dot(page: Path):
    """Makes a page (40 s). Of 844 px, what stays at the top takes less than 100; the dot that Enter
    chose has the focus on."""
    at = "document.getElementById('%s').getBoundingClientRect().%s"
    with chromium() as tab:
        tab.open(page.as_uri(), 390, 844)
        tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        tab.value("window.scrollTo(0, 1500)")
        assert tab.value(at % ("verdict", "top")) == 0
        assert 20 < tab.value(at % ("verdict", "bottom")) < 100
        assert tab.value(at % ("cards", "bottom")) < 0
        for chart in ("days", "map"):
            tab.value(f"document.querySelector('#{chart} circle').focus()")
            tab.key("Enter")
            dot = tab.value("document.activeElement.dataset.dot")
            assert dot is not None
            assert dot.startswith(chart)
            assert tab.value("document.getElementById('tip').style.display") == "none"
        assert tab.complaints == []


def type_in(tab: Tab, selector: str, text: str) -> None:
    """Type into a field, and leave it."""
    tab.value(
        f"{{ const input = document.querySelector({json.dumps(selector)});"
        f" input.value = {json.dumps(text)}; input.dispatchEvent(new Event('change')); }}"
    )


@pytest.mark.skipif(NODE is None, reason="no Node")
def test_the_page_reads_counts_as_the_commands_do():
    """One grammar in two languages."""
    words = (
        "300B 300b 1.5e12 .5t 300_000 1_0 1_000.5k 1g 7 0 -3 1e 1. . 1,5B 3e11x 1e400 1e5k nan inf",
        "0x10 5_ 1E3M _ _5 1__0k 1_.5",
    )
    texts = ["", " ", " 7 B ", "7 B x", "3e11 bananas", *" ".join(words).split()]

    def read(text: str) -> float | None:
        try:
            return parse_count("tokens", text)
        except ConfigError:
            return None

    assert in_node("input.map((each) => answers.parseCount(each))", texts) == [
        None if (value := read(text)) is None else pytest.approx(value, rel=1e-15) for text in texts
    ]


RUN = """
[model]
name = "gpt"
layers = 4
hidden = 256
heads = 4
[data]
name = "synthetic_tokens"
tokens = 256
vocabulary = 1024
train_examples = 100000
[batch]
global_batch = 32
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.001
[layout]
tensor = 2
zero_stage = 1
"""


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="no Node")
def test_the_command_of_the_page_predicts_what_it_shows(tmp_path: Path):
    """Compiles a step (15 s). Of a run file that says another layout, on a cluster file and
    hardware that were given by flag: the command that the page prints has them all, in any shell;
    of XLA's step, compiled, and of a framework with kernels of its own."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    run, cluster, path = folder / "run.toml", folder / "mine.toml", folder / "page.html"
    run.write_text(RUN)
    cluster.write_text('based_on = "dgx-h100"\n')
    given = ["--chip.memory_bytes_per_second", "0.5x", "--network.bytes_per_second", "0.25x",
             "--conditions.step_cv", "0.05", "--batch.global_batch", "16"]  # fmt: skip
    options = "--devices 16 --batches 32 --networks 0.5,1 --layouts 2 --tokens 1B"
    assert main(["page", str(run), "--cluster", str(cluster), *options.split(), *given,
                 "--frameworks", "xla,megatron-core-2026", "--precisions", "float32",
                 "--output", str(path)]) == 0  # fmt: skip
    data = data_of(path)
    at = [(network, each["name"]) for network in data["networks"] for each in data["frameworks"]]
    for network, framework in at:
        state = {**data["start"], "network": network, "framework": framework, "prices": {},
                 "layout": None}  # fmt: skip
        ask = "((found) => [found.chosen, answers.command(input[0], input[1], found.chosen)])"
        chosen, command = in_node(f"{ask}(answers.answer(input[0], input[1]))", [data, state])
        words = subprocess.run(
            ["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        out = folder / "out.json"
        assert words[:2] == ["scalejax", "predict"]
        assert main([*words[1:], "--json", str(out)]) == 0
        found = json.loads(out.read_text())
        assert found["predictions"][0]["step_seconds"] == pytest.approx(chosen["step"], rel=1e-4)


@pytest.mark.skipif(NODE is None, reason="there is no Node here")
def test_times_have_the_unit_that_a_person_would_use():
    """The headline of a page, in days of the arithmetic: seconds too."""
    script = (SCRIPTS / "explorer.js").read_text(encoding="utf-8")
    (words,) = re.findall(r"  (const digits = .*?;\n  const time = .*?;\n)", script, re.DOTALL)
    times = [15.8 / 86_400, 90 / 86_400, 0.1, 3]

    shown = in_node(f"(() => {{ {words} return input.map(time); }})()", times)

    assert shown == ["15.8 s", "1.5 min", "2.4 hours", "3 days"]


def in_node(expression: str, given: object) -> Any:
    """The value of an expression over `answers`, the page's arithmetic, and `input`."""
    assert NODE is not None
    script = (
        f"const answers = require({json.dumps(str(SCRIPTS / 'explorer_answers.js'))});"
        "const input = JSON.parse(require('fs').readFileSync(0));"
        f"console.log(JSON.stringify({expression}))"
    )
    done = subprocess.run(
        [NODE, "-e", script], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


BY_HAND = {
    "tokensPerSample": 1000,
    "clusters": [
        {"name": "a", "price": 2.0, "watts": 1000.0, "pue": 1.2, "memoryBytes": 80},
        {"name": "b", "price": None, "watts": None, "pue": None, "memoryBytes": 80},
    ],
    "devices": [10, 100],
    "batches": [50],
    "dtypes": ["bfloat16"],
    "networks": [1],
    "frameworks": [{"name": "xla"}],
    "terms": ["compute", "memory"],
    "layouts": [{"words": each, "flags": ""} for each in ("data", "fsdp", "tensor")],
    "refusals": ["b has at most 10"],
    "origins": ["compiled", "kernels", "closed_form"],
    # layout, step, p10, p90, MFU, fits, state, work, peak, goodput, origin, terms
    "cells": {
        "0,0,0,0,0,0": [
            [0, 3.6, 3.5, 3.8, 0.5, 1, 10, 20, 31, None, 0, 0, 3.0, 1, 0.6],
            [1, 7.2, None, None, None, 0, 10, 80, 91, None, 0, 0, 7.2],
            [2, 1.8, None, None, None, 1, 10, 20, 31, None, 2, 0, 1.8],
        ],
        "0,1,0,0,0,0": [[0, 0.36, None, None, None, 1, 10, 20, 31, 0.9, 0, 0, 0.36]],
        "1,0,0,0,0,0": [[0, 1.8, None, None, None, 1, 10, 20, 31, None, 2, 0, 1.8]],
        "1,1,0,0,0,0": 0,
    },
}
SETTING = {
    "cluster": "a", "devices": 10, "batch": 50, "precision": "bfloat16", "network": 1,
    "framework": "xla", "tokens": 49_999_001, "layout": None, "prices": {}, "grid": 500,
}  # fmt: skip


@pytest.mark.skipif(NODE is None, reason="no Node")
def test_the_arithmetic_of_the_page_by_hand():
    """1,000 updates of 3.6 s are an hour: 10 device-hours, $20, 12 kWh, 6 kg. On 100 devices a
    tenth of it, over a goodput of 0.9. A cluster twice as fast is worth twice the price. A layout
    that was not compiled is not to be chosen beside others that were."""
    asked = [{}, {"layout": "fsdp"}, {"layout": "tensor"}, {"devices": 100},
             {"cluster": "b", "devices": 100}]  # fmt: skip
    given = {"data": BY_HAND, "settings": [SETTING | each for each in asked]}
    best, named, closed, larger, refused = in_node(
        "input.settings.map((each) => answers.answer(input.data, each))", given
    )
    even = in_node("answers.breakEven(input.data, input.settings[0], 'b')", given)

    chosen = best["chosen"]
    assert chosen["updates"] == 1000
    assert chosen["days"] == pytest.approx(1 / 24)
    assert (chosen["deviceHours"], chosen["dollars"]) == pytest.approx((10, 20))
    assert (chosen["mwh"], chosen["kilograms"]) == pytest.approx((0.012, 6))
    assert chosen["lowDays"] == pytest.approx(3500 / 86_400)
    assert [each["name"] for each in chosen["waterfall"]] == ["compute", "memory"]
    assert best["isBest"]
    assert named["chosen"]["fits"] is False
    assert not named["isBest"]
    assert closed["chosen"]["layout"] == "data"
    assert [each["origin"] for each in closed["options"]] == ["compiled", "compiled", "closed_form"]
    assert larger["chosen"]["days"] == pytest.approx(360 / 0.9 / 86_400)
    assert refused["refused"] == "b has at most 10"
    assert even["ratio"] == pytest.approx(2)
    assert even["price"] == pytest.approx(4)


@pytest.mark.skipif(NODE is None, reason="no Node")
def test_a_curve_is_straight_on_logarithms_where_it_is_read():
    """Between 10 devices at 100 days and 1,000 at 1 day, 100 devices take 10."""
    ask = "answers.crossing([{x: 10, y: 100}, {x: 1000, y: 1}], input)"

    assert in_node(ask, 10) == pytest.approx(100)
    assert in_node(ask, 200) is None


def test_own_figures_of_a_cluster_are_not_called_list_prices():
    """A what-if has no date; what the command was given is said to be given."""
    cluster = load_cluster("dgx-h100")
    changes = {"price.dollars_per_device_hour": 1.5, "power.training_watts": 500}
    own = with_hardware(cluster, changes)
    listed, given, flagged = (
        cluster_table(each, rates_of(each, price_per_device_hour=price))
        for each, price in ((cluster, None), (own, None), (cluster, 1.25))
    )

    assert str(listed["priceSource"]).startswith("List price of 20")
    assert given["priceSource"] == "Own price: given: 1.5"
    assert str(given["wattsSource"]).endswith("given: 500")
    assert flagged["priceSource"] == "Price: as given to the command"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("llama3-8c --cluster dgx-h100 --batches 64", "did you mean"),
        ("scalejax/config/examples/fashion_small_batch.toml --cluster dgx-h100", "gpt and llama"),
        ("gpt2-124m --cluster dgx-h10 --batches 64", "dgx-h100"),
        ("gpt2-124m --clusters dgx-h100, --batches 64", "names with commas"),
        ("scalejax/config/examples/resnet50_modern.toml --cluster dgx-h100", "gpt and llama"),
        ("gpt2-124m --cluster dgx-h100 --batches 64 --networks 0", "above 0"),
        ("gpt2-124m --cluster dgx-h100 --batches 64 --precisions float9", "float9"),
        ("gpt2-124m --cluster dgx-h100 --batches 64 --frameworks megatron-cor", "megatron-core"),
        ("gpt2-124m --cluster dgx-h100 --batches 64 --tokens many", "300B"),
        ("gpt2-124m --cluster dgx-h100 --batches 64 --tokens 1e19", "at most 1e+18"),
        ("gpt2-124m --cluster dgx-h100 --batches 64 --price 1,2", "one for each of 1"),
        ("gpt2-124m --cluster dgx-h100 --batches 64 --layout.tensor 2", "tries every value"),
        ("gpt2-124m --cluster dgx-h100 --batches 64 --devices 8..4", "doublings"),
        ("gpt2-124m --cluster dgx-h100 --batches 64 --layouts 0", "layouts"),
        ("gpt2-124m --cluster dgx-h100 --batches 64 --confirm -1", "confirm=-1"),
        ("llama3-8b --cluster dgx-h100 --layouts 0", "--batches sets another"),
    ],
)
def test_what_no_page_can_be_made_of_is_refused(
    arguments: str, answer: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Before anything is costed, naming what is accepted."""
    path = tmp_path / "page.html"

    assert main(["page", *arguments.split(), "--output", str(path)]) == 2
    assert answer in capsys.readouterr().err
    assert not path.exists()
