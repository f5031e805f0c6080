"""The site of the documents: what it is made of, and what it may not ask for.

`.ci/run` builds it, where a warning, or a command on a page that fails, is an error.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import build_site
import pytest
import reference_pages
import yaml

import scalejax
from scalejax.core.serialization import load_toml

DOCS = Path(__file__).parent.parent / "docs"
PACKAGE = Path(scalejax.__file__).parent


def navigation(entries: object) -> list[str]:
    """The pages that a navigation leads to, in order."""
    if isinstance(entries, str):
        return [entries]
    inner = entries.values() if isinstance(entries, dict) else entries
    assert isinstance(inner, list | type({}.values()))
    return [page for entry in inner for page in navigation(entry)]


def test_navigation_leads_to_every_page():
    """Once each: what is written, and what is made from the code."""
    config = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))
    written = [path.relative_to(DOCS / "pages") for path in (DOCS / "pages").rglob("*.md")]

    assert sorted(navigation(config["nav"])) == sorted(
        [*(path.as_posix() for path in written), *reference_pages.pages()]
    )


def listed_commands() -> list[str]:
    """What `scalejax --help` lists."""
    shown = reference_pages.run("scalejax --help")
    return re.findall(r"^  (\w+(?: \w+)?)  +\S", shown, flags=re.MULTILINE)


def fields_of_files() -> set[str]:
    """Fields that the run files which come with scalejax give."""

    def fields_of(table: Mapping[str, object], prefix: str) -> Iterator[str]:
        for key, value in table.items():
            inner = value if isinstance(value, list) else [value]
            tables = [each for each in inner if isinstance(each, dict)]
            yield from [] if tables else [f"{prefix}{key}"]
            for each in tables:
                yield from fields_of(each, f"{prefix}{key}.")

    files = PACKAGE.glob("config/examples/*.toml")
    return {name for path in files for name in fields_of(load_toml(path), "")}


def imported_names() -> list[str]:
    """What the package's own file imports for type checkers."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    blocks = [each for each in tree.body if isinstance(each, ast.If)]
    imports = [each for block in blocks for each in block.body if isinstance(each, ast.ImportFrom)]
    return [name.name for each in imports for name in each.names]


def files_in(folder: str) -> list[str]:
    """The names of the catalogue's files."""
    return sorted(path.stem for path in (PACKAGE / "hardware" / folder).glob("*.toml"))


def fitted_frameworks() -> list[str]:
    """Those in the file of fitted constants, which has some for any other framework too."""
    fitted = load_toml(PACKAGE / "simulator" / "frameworks" / "software.toml")
    return [name for name in fitted if name != "unknown"]


@pytest.mark.parametrize(
    ("page", "heading", "names"),
    [
        ("reference/commands.md", "## scalejax {}\n", listed_commands),
        ("reference/run-file.md", "`{}`", fields_of_files),
        ("reference/python.md", "## {}\n", imported_names),
        ("reference/clusters.md", "## {}\n", partial(files_in, "clusters")),
        ("reference/chips.md", "## {}\n", partial(files_in, "chips")),
        ("reference/frameworks.md", "## {}\n", fitted_frameworks),
    ],
)
def test_reference_has_all_that_there_is(
    page: str, heading: str, names: Callable[[], Collection[str]]
):
    """As help, files and imports have it, not the lists that the pages are made from."""
    text = reference_pages.pages()[page]()
    expected = names()

    assert len(expected) > 20
    assert [name for name in expected if heading.format(name) not in text] == []


def test_flags_are_those_that_are_typed():
    """With what they take and their default: as `scalejax predict --help` has them."""
    (section,) = (
        part
        for part in reference_pages.commands_page().split("\n## ")
        if part.startswith("scalejax predict\n")
    )

    assert "| `--scaling` | weak, strong | `weak` |" in section
    assert "| `--cluster` | A,B,... | required |" in section
    assert "| `RUN.toml` |" in section


def test_command_of_a_page_is_run():
    """Its output is put below it, without the spaces that end lines of a table."""
    shown = reference_pages.with_output("A.\n\n```console\n$ scalejax models --grep bloom\n```\n")

    assert shown.startswith("A.\n\n```console\n$ scalejax models --grep bloom\nmodel ")
    assert "bloom-176b" in shown
    assert not any(line.endswith(" ") for line in shown.splitlines())


def test_command_of_a_page_that_fails_is_told():
    """A page with an error on it is never built."""
    with pytest.raises(RuntimeError, match=r"ended with exit code 2.*nonsense"):
        reference_pages.with_output("```console\n$ scalejax hardware nonsense\n```\n")


def test_equations_are_read_off_the_code():
    """With their source; what is not there is refused."""
    text = reference_pages.with_docstrings("::: scalejax.core.metrics:mfu")

    assert "mfu = model_flop / (step_seconds * device_count * peak_flop_per_second)" in text
    assert "arXiv 2204.02311" in text
    with pytest.raises(RuntimeError, match="there is none"):
        reference_pages.with_docstrings("::: scalejax.core.metrics:nothing")


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/iframe-worker/shim">',
        '<link href="https://fonts.gstatic.com" rel="preconnect">',
        "<img alt=x src=//example.org/a.png>",
        "@import 'https://example.org/a.css'",
        "a { background: url(https://example.org/a.png) }",
    ],
)
def test_page_that_asks_for_something_elsewhere_is_refused(text: str, tmp_path: Path):
    """It would not work without a network."""
    (tmp_path / "page.html").write_text(text)

    (problem,) = build_site.problems(tmp_path)

    assert problem.startswith("page.html asks for ")


def test_page_may_link_elsewhere_but_not_to_nothing(tmp_path: Path):
    """A reader may follow a link; a file that is not there is a mistake."""
    (tmp_path / "page.html").write_text(
        '<a href="https://arxiv.org/abs/1706.02677">paper</a> <a href="page.html#here">here</a>'
        '<img src="absent.png">'
    )

    assert build_site.problems(tmp_path) == ["page.html asks for absent.png, which is not there"]


def test_notebook_becomes_a_page(tmp_path: Path):
    """Cells as they were saved: text, code, what it printed, tables, pictures."""
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["2\n"]},
        {"output_type": "stream", "name": "stderr", "text": ["noise\n"]},
        {"output_type": "execute_result", "data": {"text/html": ["<b>x</b>"], "text/plain": ["x"]}},
        {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": ["y"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Words."]},
        {"cell_type": "code", "source": ["print(1 + 1)"], "outputs": outputs},
    ]
    path = tmp_path / "first.ipynb"
    path.write_text(json.dumps({"cells": cells}))

    files = build_site.notebook_files(path)

    assert files["tutorials/first-0.png"] == b"\0\0\0"
    page = files["tutorials/first.md"].decode()
    assert page.startswith("# Title\nWords.\n\n```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n")
    assert '<div class="output">\n<b>x</b>\n</div>\n\n![](first-0.png)\n' in page
    assert "noise" not in page
    assert "/first.ipynb`" in page
