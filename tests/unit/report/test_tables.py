"""Tables: the rows say what the comparison says, and no name can break a format."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from written_folders import write_study

from fedgg.analysis.compare import compare
from fedgg.report.tables import Table, as_csv, as_latex, as_markdown, comparison_tables, score_table
from fedgg.runfolder.read import read_study

NASTY = r'<b>_&%$x$ | \{~^}, "q"'


@pytest.fixture
def tables(tmp_path: Path) -> tuple[Table, Table]:
    curves = {
        "Avg": [[0.1, 0.5], [0.2, 0.6], [0.1, 0.55]],
        NASTY: [[0.6, 0.7], [0.6, 0.8], [0.2, 0.753]],
        "Odd": [[0.5, 0.9], [0.4, 0.5], [0.9, 0.1]],
    }
    statuses = {("Odd", 2): "diverged"}
    return comparison_tables(compare(read_study(write_study(tmp_path, curves, reference="Avg", statuses=statuses))))


def test_accuracy_rows(tables: tuple[Table, Table]) -> None:
    table = tables[0]
    assert table.rows[0] == ("Avg", "3", "55.0 ± 5.0", "55.0 ± 5.0", "reference", "lower")
    assert table.rows[1] == (NASTY, "3", "75.1 ± 5.0", "75.1 ± 5.0", "+20.1 ± 0.4 higher", "best")
    assert table.rows[2][:3] == ("Odd", "2, 1 diverged", "70.0 ± 28.3")
    assert table.rows[2][4].endswith(" too few seeds")
    assert table.rows[2][5] == "too few seeds"
    notes = " ".join(table.notes)
    assert "not distinguishable" in notes
    assert f"best row, {NASTY}" not in notes  # two seeds do not say that Odd is as good
    assert "Odd: seed 2 excluded from the averages (diverged)" in notes


def test_target_rows(tables: tuple[Table, Table]) -> None:
    table = tables[1]
    assert table.rows[0][:4] == ("Avg", "2.0", "2.0", "1.0×")
    assert table.rows[1][:4] == (NASTY, "1.3", "1.3", "1.5×")
    assert table.rows[2][:4] == ("Odd", "1.0 (1 of 3)", "1.0", "–")
    assert table.rows[2][4:] == ("–", "–", "–")


def test_every_row_has_every_column(tables: tuple[Table, Table]) -> None:
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_one_seed_makes_no_claim(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, {"A": [[0.5]], "B": [[0.6]]}, reference="A"))
    assert score_table(compare(study)).rows[1] == ("B", "1", "60.0", "60.0", "+10.0 too few seeds", "best")


def test_csv_comes_back_as_it_was(tables: tuple[Table, Table]) -> None:
    for table in tables:
        back = [tuple(row) for row in csv.reader(io.StringIO(as_csv(table)))]
        assert back == [table.columns, *table.rows]


def test_markdown_is_escaped(tables: tuple[Table, Table]) -> None:
    lines = as_markdown(tables[0]).splitlines()
    assert lines[2].startswith("| algorithm | runs |")
    nasty = lines[5]
    assert nasty.startswith(r"| \<b\>\_\&%\$x\$ \| \\{\~^}, ")
    assert nasty.replace(r"\|", "").count("|") == len(tables[0].columns) + 1
    assert lines[-1].startswith("- ")


def test_latex_is_escaped(tables: tuple[Table, Table]) -> None:
    text = as_latex(tables[0])
    name = r"\textless{}b\textgreater{}\_\&\%\$x\$ \textbar{} \textbackslash{}\{\textasciitilde{}\textasciicircum{}\}, "
    assert name in text
    assert r"75.1 $\pm$ 5.0" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 1 + len(tables[0].rows)
    assert all(row.replace(r"\&", "").count("&") == len(tables[0].columns) - 1 for row in rows)
    assert text.isascii()


def test_a_name_of_two_lines_stays_in_its_cell() -> None:
    table = Table("two\nlines", ("a",), (("x\ny",),))
    assert "| x y |" in as_markdown(table)
    assert "x y \\\\" in as_latex(table)
