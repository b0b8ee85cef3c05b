"""Fill the tables of docs/numbers.md from results/paper/*.json, and draw its figures: `make numbers`.

The text between the blocks is written by hand and stays as it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedgg.errors import UserError
from fedgg.paper.find_or_run import ArchivedRuns, NoRuns, Results
from fedgg.paper.output import ItemOutput, block, make_items
from fedgg.paper.plan import DATASETS, ITEMS, ReproductionPlan
from fedgg.report.figure_style import save

HOME = Path(__file__).parent.parent
PAGE = HOME / "docs" / "numbers.md"
RESULTS = HOME / "results" / "paper"
PLAN = ReproductionPlan(tuple(ITEMS.values()), tuple(DATASETS), (0, 1, 2), readings=("text", "epsilon"))
_BLOCK = re.compile(r"<!-- ((?!end)[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def item_outputs() -> list[ItemOutput]:
    results: Results = ArchivedRuns(RESULTS) if RESULTS.is_dir() else NoRuns()
    return make_items(PLAN, results, "highest", run=False)


def filled(page: str, items: list[ItemOutput]) -> str:
    """The page with every block replaced; UserError if blocks and items do not correspond."""
    blocks = {output.item.name: block(output, f"figures/paper-{output.item.name}.png") for output in items}
    present = _BLOCK.findall(page)
    if sorted(present) != sorted(blocks):
        raise UserError(
            f"{PAGE.name} has blocks for {', '.join(present)}; it needs one for each of {', '.join(blocks)}"
        )
    return _BLOCK.sub(lambda match: f"<!-- {match[1]} -->\n{blocks[match[1]]}<!-- end -->", page)


def main() -> None:
    items = item_outputs()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), items), encoding="utf-8")
    for output in items:
        picture = HOME / "docs" / "figures" / f"paper-{output.item.name}.png"
        if output.figure is not None:
            save(output.figure.figure, picture)
            print(picture.relative_to(HOME))
    print(PAGE.relative_to(HOME))


if __name__ == "__main__":
    main()
