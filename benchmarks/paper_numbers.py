"""Fill the tables of docs/numbers.md from results/paper/*.json, and draw its figures: `make numbers`.

What stands between the blocks is written by hand and kept.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedgg.errors import UserError
from fedgg.paper.output import ItemOutput, block, make_items
from fedgg.paper.plan import DATASETS, ITEMS, ReproductionPlan
from fedgg.paper.runs import ArchivedRuns, NoRuns, Results
from fedgg.report.figure_style import save

HOME = Path(__file__).parent.parent
PAGE = HOME / "docs" / "numbers.md"
RESULTS = HOME / "results" / "paper"
PLAN = ReproductionPlan(tuple(ITEMS.values()), tuple(DATASETS), (0, 1, 2), readings=("text", "epsilon"))
_BLOCK = re.compile(r"<!-- ((?!end)[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def made() -> list[ItemOutput]:
    results: Results = ArchivedRuns(RESULTS) if RESULTS.is_dir() else NoRuns()
    return make_items(PLAN, results, "highest", run=False)


def filled(page: str, items: list[ItemOutput]) -> str:
    """The page with every block replaced; one that names no item is an error, and so is an item without a block."""
    blocks = {one.item.name: block(one, f"figures/paper-{one.item.name}.png") for one in items}
    found = _BLOCK.findall(page)
    if sorted(found) != sorted(blocks):
        raise UserError(f"{PAGE.name} has blocks for {', '.join(found)}; it needs one for each of {', '.join(blocks)}")
    return _BLOCK.sub(lambda match: f"<!-- {match[1]} -->\n{blocks[match[1]]}<!-- end -->", page)


def main() -> None:
    items = made()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), items), encoding="utf-8")
    for one in items:
        picture = HOME / "docs" / "figures" / f"paper-{one.item.name}.png"
        if one.figure is not None:
            save(one.figure.figure, picture)
            print(picture.relative_to(HOME))
    print(PAGE.relative_to(HOME))


if __name__ == "__main__":
    main()
