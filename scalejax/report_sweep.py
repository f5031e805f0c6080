"""The part of the report that shows sweeps: what each arm reached, over its seeds."""

from collections.abc import Sequence
from html import escape

from scalejax.report_page import Page
from scalejax.report_sources import SweepSource
from scalejax.sweep.results import arms
from scalejax.sweep_tables import arm_cells, arm_headings, results_in_words


def add_sweeps(page: Page, sweeps: Sequence[SweepSource]) -> None:
    """Append a table of every sweep: a row for runs that differ in nothing but their seed."""
    page.add('<h2 id="sweeps">Sweeps</h2>')
    for sweep in sweeps:
        with_target = sweep.plan.target is not None
        page.add(f"<h3>{escape(sweep.name)}: {len(sweep.plan.runs)} runs</h3>")
        page.add(f"<p>{escape(results_in_words(sweep.plan, sweep.rows))}</p>")
        page.add_table(
            ["mean over seeds of", *arm_headings(with_target=with_target)],
            [arm_cells(arm, with_target=with_target) for arm in arms(sweep.rows)],
        )
        if sweep.kept_every > 1:
            page.add(
                f'<p class="soft">Of the training loss and the learning rate, one line of the '
                f"record in {sweep.kept_every} is drawn.</p>"
            )
