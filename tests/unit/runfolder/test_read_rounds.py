"""rounds.jsonl has one reader: a whole file, a file in pieces and the part to resume from give the same rounds."""

from __future__ import annotations

import json

import pytest

from fedgg.runfolder.checksums import LineChecksums
from fedgg.runfolder.read_rounds import RoundsReader, read_intact_rounds


def written(*numbers: int) -> bytes:
    """A file with checksums, as a run writes it."""
    checksums, lines = LineChecksums(), []
    for number in numbers:
        lines.append(checksums.next_line({"round": number, "test_accuracy": number / 10}))
        checksums.add(lines[-1])
    return b"".join(lines)


def numbers(rounds: list[dict[str, object]]) -> list[object]:
    return [line["round"] for line in rounds]


@pytest.mark.parametrize("torn", [b"", b'{"round": 4, "te', b'{"round": 4}'])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_pieces_and_the_whole_are_the_same(torn: bytes, piece: int) -> None:
    content = written(1, 2, 3) + torn
    reader = RoundsReader(checksums_required=True)
    for end in range(piece, len(content) + piece, piece):
        reader.add(content[reader.bytes_read : end])
    whole = read_intact_rounds(content, checksums_required=True)
    assert reader.rounds == whole.rounds
    assert numbers(reader.rounds) == [1, 2, 3]
    assert reader.ends == whole.ends
    assert whole.up_to(3) == written(1, 2, 3)
    assert (reader.complaints, reader.checksums.complaint, whole.damage) == ([], None, None)


def test_damage_is_passed_over_or_the_end() -> None:
    """The report shows what is left; a resumed run builds on what comes before."""
    lines = [json.dumps({"round": number}) for number in (1, 2, 3, 5)]
    content = ("\n".join([lines[0], "nonsense", *lines[1:]]) + "\n").encode()
    reader = RoundsReader()
    reader.add(content)
    assert numbers(reader.rounds) == [1, 2, 3, 5]
    assert [complaint.partition(":")[0] for complaint in reader.complaints] == ["line 2"]
    intact = read_intact_rounds(content)
    assert numbers(intact.rounds) == [1]
    assert intact.damage == reader.complaints[0]
    gap = read_intact_rounds("".join(f"{line}\n" for line in lines).encode())
    assert numbers(gap.rounds) == [1, 2, 3]
    assert gap.damage == "line 4 has round 5, where round 4 belongs"


def test_a_checksum_that_does_not_fit_ends_what_can_be_resumed() -> None:
    content = written(1, 2, 3).replace(b"0.2", b"0.9")
    reader = RoundsReader(checksums_required=True)
    reader.add(content)
    assert numbers(reader.rounds) == [1, 2, 3]
    intact = read_intact_rounds(content, checksums_required=True)
    assert numbers(intact.rounds) == [1]
    assert intact.damage == reader.checksums.complaint == "line 2 does not fit its checksum"
