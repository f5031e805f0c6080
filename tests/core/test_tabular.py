"""Results as data frames, and as the HTML that a notebook shows."""

import re
import subprocess
import sys
from dataclasses import dataclass
from xml.etree import ElementTree

import pyarrow
import pytest

from scalejax.core import drawing, progress
from scalejax.core.errors import ConfigError
from scalejax.core.progress import Progress
from scalejax.core.tabular import Tabular


@dataclass(frozen=True)
class Steps(Tabular):
    """A result of two rows."""

    def to_rows(self):
        """One with every figure, one without a memory."""
        return [
            {"cluster": "dgx-h100", "device_count": 256, "step_seconds": 0.0072, "mfu": 0.41,
             "peak_memory_bytes": 3 * 2**30, "epoch_seconds": None},
            {"cluster": "a<b", "device_count": 1024, "step_seconds": 61.0, "mfu": None,
             "peak_memory_bytes": None, "epoch_seconds": None},
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_rows_become_a_data_frame(name: str):
    """With their columns and types; what is unknown is null."""
    pytest.importorskip(name)
    frame = getattr(Steps(), f"to_{name}")()

    assert list(frame.columns) == list(Steps().to_rows()[0])
    assert list(frame["device_count"]) == [256, 1024]
    assert frame["step_seconds"].sum() == 61.0072


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_missing_library_is_refused_in_a_line(name: str, monkeypatch):
    """That names what to install, and what does without."""
    monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ConfigError, match=rf"to_{name} needs {name} \(pip install {name}\)"):
        getattr(Steps(), f"to_{name}")()


def test_arrow_takes_a_result_as_it_is():
    """And with it every library that speaks its PyCapsule interface."""
    assert pyarrow.table(Steps()).to_pylist() == Steps().to_rows()


@dataclass(frozen=True)
class Entries(Tabular):
    """A result whose rows have columns of their own."""

    def to_rows(self):
        """Two, of which the second has one more and one less."""
        return [{"name": "h100", "chip": "x"}, {"name": "b200", "memory_bytes": 1}]


@pytest.mark.parametrize("form", [pyarrow.table, "to_pandas", "to_polars"])
def test_every_form_has_the_columns_of_all_rows(form):
    """In the order in which they appear; where a row has none, nothing is known."""
    pytest.importorskip(form[3:] if isinstance(form, str) else "pyarrow")
    found = getattr(Entries(), form)() if isinstance(form, str) else form(Entries())
    names = found.column_names if form is pyarrow.table else found.columns

    assert list(names) == ["name", "chip", "memory_bytes"]
    assert re.findall(r"<th(?: [^>]*)?>(.*?)</th>", Entries()._repr_html_()) == [
        "name", "chip", "memory",
    ]  # fmt: skip


def test_a_table_has_units_and_no_column_of_which_nothing_is_known():
    """Names carry the units; markup in a name is text."""
    html = Steps()._repr_html_()
    cells = [each.replace("\u00a0", " ") for each in re.findall(r"<td(?: [^>]*)?>(.*?)</td>", html)]

    assert re.findall(r"<th(?: [^>]*)?>(.*?)</th>", html) == [
        "cluster", "devices", "step", "MFU", "peak memory",
    ]  # fmt: skip
    assert cells[:5] == ["dgx-h100", "256", "7.2 ms", "41.0 %", "3.0 GiB"]
    assert cells[5:] == ["a&lt;b", "1,024", "1 min 01 s", "–", "–"]


def test_a_waterfall_adds_up_and_names_what_is_unknown():
    """Each bar begins where the one before ends, and the last is as long as all."""
    html = drawing.waterfall(
        [("compute", 3.0), ("wait", 0.0), ("send", 1.0), ("input", None)], "all"
    )
    svg, rest = html.split("</svg>")
    bars = list(ElementTree.fromstring(f"{svg}</svg>").iter("rect"))
    begins, widths = ([float(bar.attrib[key]) for bar in bars] for key in ("x", "width"))

    assert widths[0] == pytest.approx(3 * widths[1], abs=0.2)
    assert begins[1] == pytest.approx(begins[0] + widths[0], abs=0.2)
    assert widths[2] == pytest.approx(widths[0] + widths[1], abs=0.2)
    assert "not known: input" in rest


def test_curves_are_straight_where_the_figure_is_in_proportion():
    """On logarithmic axes, along the dashed line; one number of devices has no curve."""
    svg = drawing.curves({"a": [(8, 10.0), (64, 80.0), (512, 640.0)]}, "devices", "y", ideal="a")
    dashed, line = re.findall(r'd="M([^"HV]*)" fill="none" stroke="(?:currentC|#)', svg)
    ends = [line.split("L")[0], line.split("L")[-1]]

    assert dashed.split("L") == ends
    assert drawing.curves({"a": [(8, 10.0)]}, "devices", "y") == ""


@pytest.mark.parametrize("values", [(3.0, 0.0, -1.0), (-2.0, -2.0), (0.0, 0.0)])
def test_a_curve_of_values_that_are_not_above_zero_has_an_even_axis(values):
    """As of a loss that is negative; heights are in proportion to differences."""
    svg = drawing.curves({"a": list(enumerate(values, start=1))}, "updates", "loss")
    heights = [float(each) for each in re.findall(r'cy="([0-9.]+)"', svg)]
    ticks = [float(each) for each in re.findall(r'text-anchor="end"[^>]*>([^<]+)<', svg)]

    assert 2 <= len(ticks) <= 8
    assert all(min(values) - 1 < each < max(values) + 1 for each in ticks)
    if len(values) == 3:
        assert heights[1] - heights[0] == pytest.approx(3 * (heights[2] - heights[1]), abs=0.3)
    else:
        assert heights[0] == heights[1]


def test_spans_are_as_long_as_they_last():
    """In the lane of their stream."""
    svg = drawing.lanes({"compute": [(0, 3, "a"), (4, 8, "b")], "links": [(3, 4, "c")]})
    widths = [float(each.attrib["width"]) for each in ElementTree.fromstring(svg).iter("rect")]

    assert [round(each / widths[2]) for each in widths] == [3, 4, 1]


@pytest.fixture
def cell(monkeypatch):
    """What a notebook's cell shows below it, at each change."""
    shown: list[str] = []

    class Handle:
        def update(self, data):
            shown.append(data.data)

    def display(data, display_id):
        shown.append(data.data)
        return Handle()

    monkeypatch.setattr(progress, "is_in_cell", lambda: True)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_CHANGES", 0)
    pytest.importorskip("IPython")
    monkeypatch.setattr("IPython.display.display", display)
    return shown


def test_progress_is_one_line_of_a_cell_that_goes(cell, capsys):
    """Without a terminal's control characters, and with nothing on standard error."""
    with progress.in_cell(progress.compiling(2)) as on_progress:
        for part, done in (("8 devices", 0), ("8 devices", 1), ("64 devices", 1)):
            on_progress(Progress(part=part, done=done))

    assert [re.sub("<.*>", "", each).strip() for each in cell] == [
        "compiling for 8 devices (10 to 30 s each), 0 of 2",
        "compiling, 1 of 2",
        "compiling, 2 of 2",
        "",
    ]
    assert capsys.readouterr() == ("", "")


def test_scripts_show_no_progress_of_their_own(capsys):
    """What they print is theirs."""
    with progress.in_cell(progress.compiling(1)) as on_progress:
        on_progress(Progress(part="8 devices", done=1))

    assert capsys.readouterr() == ("", "")


def test_a_session_without_a_gpu_hears_one_line_of_its_compiler():
    """Which fails to find cuDNN in twenty lines; any other plug-in's failure is told as it was."""
    said = subprocess.run(
        [sys.executable, "-c", _SESSION], capture_output=True, text=True, check=True
    )

    of_cuda, of_rocm = said.stderr.splitlines()
    assert "no NVIDIA driver" in of_cuda
    assert of_rocm == "of_rocm"


_SESSION = """
import logging
import scalejax
scalejax.core.environment._has_nvidia_driver = lambda: False
logging.basicConfig(format="%(message)s")
logger = logging.getLogger("jax._src.xla_bridge")
for plugin in ("jax_plugins.xla_cuda13", "of_rocm"):
    try:
        raise RuntimeError
    except RuntimeError:
        logger.error("%s", plugin, exc_info=plugin.startswith("jax"))
"""


def test_a_table_as_text_says_once_what_its_rows_share():
    """Other columns are side by side, in parts that fit, each with the first of them; what is
    unknown in all rows is left out."""
    rows = [
        {"cluster": "a", "device_count": n, "step_seconds": n / 10, "mfu": 1 / n, "price": None}
        for n in (2, 16)
    ]

    assert drawing.text_of(rows) == (
        "cluster  a\n\ndevices    step     MFU\n      2  200 ms  50.0 %\n     16   1.6 s   6.2 %"
    )
    assert drawing.text_of(rows, width=16) == (
        "cluster  a\n\ndevices    step\n      2  200 ms\n     16   1.6 s\n"
        "\ndevices     MFU\n      2  50.0 %\n     16   6.2 %"
    )
    assert drawing.text_of(rows[:1]) == "cluster  a\ndevices  2\nstep     200 ms\nMFU      50.0 %"
    assert drawing.text_of([]) == ""
    terms = [{"name": "memory", "seconds": 0.02}, {"name": "launch gaps", "seconds": 1.5}]
    assert drawing.text_of(terms) == "name          time\nmemory       20 ms\nlaunch gaps  1.5 s"
    assert drawing.notes_text(["a b c", "d --e-f"], width=10) == (
        "\nnote: a b\n  c.\nnote: d\n  --e-f."
    )
    assert str(Steps()) == drawing.text_of(Steps().to_rows())
