"""Write the runs of a study's folder to an archive: one small file for results/.

    python benchmarks/fold.py runs/STUDY results/NAME.json --note "a remark for readers"

It contains the undamaged runs below the folder that have ended; `fedgg.runfolder.archive_file` reads the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedgg.runfolder.archive_file import write_archive
from fedgg.runfolder.read import read_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    folders = sorted(config.parent for config in options.study.glob("**/seed-*/config.toml"))
    records = [read_run(folder) for folder in folders]
    for record in records:
        if record.damaged:
            print(f"{record.path} is damaged and left out of the archive: {record.faults[0].why}")
    count = write_archive(records, options.result, options.note)
    print(f"{count} of {len(folders)} runs archived in {options.result}")


if __name__ == "__main__":
    main()
