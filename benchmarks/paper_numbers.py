"""Fill the tables of docs/numbers.md and docs/literature.md from results/paper/*.json, and draw: `make numbers`.

The text between the blocks is written by hand and stays as it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedgg.errors import UserError
from fedgg.paper.find_or_run import ArchivedRuns, NoRuns, Results
from fedgg.paper.items import DATASETS, ITEMS
from fedgg.paper.output import ItemOutput, block, make_items
from fedgg.paper.plan import ReproductionPlan, preset
from fedgg.report.figure_style import save

HOME = Path(__file__).parent.parent
PAGE = HOME / "docs" / "numbers.md"
RESULTS = HOME / "results" / "paper"
LITERATURE = HOME / "docs" / "literature.md"
PAGES = {
    PAGE: tuple(item for item in ITEMS.values() if not item.literature),
    LITERATURE: tuple(item for item in ITEMS.values() if item.literature),
}
_BLOCK = re.compile(r"<!-- ((?!end)[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def item_outputs(page: Path = PAGE) -> list[ItemOutput]:
    """The items of a page: of other papers with the seeds of their studies, of the paper with rows in one precision."""
    results: Results = ArchivedRuns(RESULTS, "fp32" if page == LITERATURE else None) if RESULTS.is_dir() else NoRuns()
    outputs: list[ItemOutput] = []
    for item in PAGES[page]:
        seeds = tuple(preset(item.study).seeds) if page == LITERATURE else (0, 1, 2)
        plan = ReproductionPlan((item,), tuple(DATASETS), seeds, readings=("text", "epsilon"))
        outputs += make_items(plan, results, "highest", run=False)
    return outputs


def filled(page: str, items: list[ItemOutput]) -> str:
    """The page with every block replaced; UserError if blocks and items do not correspond."""
    blocks = {output.item.name: block(output, f"figures/paper-{output.item.name}.png") for output in items}
    present = _BLOCK.findall(page)
    if sorted(present) != sorted(blocks):
        raise UserError(f"the page has blocks for {', '.join(present)}; it needs one for each of {', '.join(blocks)}")
    return _BLOCK.sub(lambda match: f"<!-- {match[1]} -->\n{blocks[match[1]]}<!-- end -->", page)


def main() -> None:
    for page in PAGES:
        items = item_outputs(page)
        page.write_text(filled(page.read_text(encoding="utf-8"), items), encoding="utf-8")
        for output in items:
            picture = HOME / "docs" / "figures" / f"paper-{output.item.name}.png"
            if output.figure is not None:
                save(output.figure.figure, picture)
                print(picture.relative_to(HOME))
        print(page.relative_to(HOME))


if __name__ == "__main__":
    main()
