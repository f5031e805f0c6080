"""Notebooks of `docs/notebooks`: run in kernels of their own, and compared with what they show.

`python tests/support/notebooks.py [NAME ...]` runs all, or those of these names, in full, and
writes what they print into them.
"""

import html
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MEASURED = "measured"
"""Tag of cells that train or read clocks: their words are compared, their numbers are not."""
_TOLERANCE = 0.011
"""Numbers are printed with three digits or more: the last may differ by rounding."""
_ENDS = {"completed,", "diverged,", "nan%"}
"""How a run ended."""
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def executed(path: Path, folder: Path) -> Any:
    """The notebook with what its cells print now.

    Args:
        path: the notebook.
        folder: the working directory of its kernel.
    """
    notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [each for each in map(_plain, cell.outputs) if each is not None]
            cell.outputs = _joined(outputs)
    return notebook


def _plain(output: Any) -> Any:
    """An output as it is kept; None of progress that has gone."""
    data = output.get("data", {})
    if "text/html" in data:
        if not data["text/html"]:
            return None
        data.pop("text/plain", None)  # pages of fields
    output.pop("execution_count", None)
    if output.output_type == "execute_result":
        output.execution_count = None
    output.metadata = nbformat.NotebookNode()
    if output.output_type == "stream":
        del output["metadata"]
    return output


def _joined(outputs: list[Any]) -> list[Any]:
    """Outputs, of which lines that were printed one after another are one."""
    found: list[Any] = []
    for each in outputs:
        is_more = found and each.output_type == found[-1].output_type == "stream"
        if is_more and each.name == found[-1].name:
            found[-1].text += each.text
        else:
            found.append(each)
    return found


def text_of(output: Any) -> str:
    """The words and numbers of an output, without markup."""
    if output["output_type"] == "stream":
        return "".join(output["text"])
    data = output.get("data", {})
    shown = "".join(data.get("text/html", data.get("text/plain", "")))
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", shown)).split())


def differences(kept: Any, now: Any) -> list[str]:
    """What cells print that is not what they show, a line for each cell."""
    found = []
    for number, (before, after) in enumerate(zip(kept.cells, now.cells, strict=True)):
        if before.cell_type != "code":
            continue
        shown, printed = ("\n".join(map(text_of, cell.outputs)) for cell in (before, after))
        is_measured = MEASURED in before.metadata.get("tags", ())
        if not same(shown, printed, are_numbers_compared=not is_measured):
            found.append(f"cell {number} shows {shown!r}, and prints {printed!r}")
    return found


def same(a: str, b: str, *, are_numbers_compared: bool = True) -> bool:
    """Whether two texts have the same words, and the same numbers but for rounding; where numbers
    are not compared, there may be more or fewer of them, and a run may end otherwise."""
    if not are_numbers_compared:
        words, others = ({*_NUMBER.sub("#", text).split()} - _ENDS for text in (a, b))
        return words == others
    words, others = (_NUMBER.sub("#", text).split() for text in (a, b))
    numbers = [[float(each.replace(",", "")) for each in _NUMBER.findall(t)] for t in (a, b)]
    return words == others and all(
        math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-12)
        for one, other in zip(*numbers, strict=True)
    )


def main() -> None:
    """Run notebooks in full, and write them."""
    import jax

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    wanted = sys.argv[1:]
    for path in NOTEBOOKS:
        if wanted and path.stem not in wanted:
            continue
        notebook = executed(path, ROOT)
        notebook.metadata = nbformat.NotebookNode(
            kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
            language_info={"name": "python"},
            scalejax={"jax": jax.__version__},
        )
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.execution_count = None
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
