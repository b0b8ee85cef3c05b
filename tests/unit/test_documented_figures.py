"""Figures in the documentation are those of the files under results/."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import scipy.stats
from benchmark_scripts import script

from fedgg.algorithms import ALGORITHMS, FedGG
from fedgg.check.cost import cost_of
from fedgg.core.algorithm import Algorithm
from fedgg.errors import UserError
from fedgg.paper.tables import PUBLISHED
from fedgg.runfolder.archive_file import read_archive
from fedgg.runfolder.record_types import RunRecord

HOME = Path(__file__).parents[2]
ENGINES = (HOME / "docs" / "engines.md").read_text(encoding="utf-8")


def test_precisions() -> None:
    precision = script("precision")
    for label, case in precision.CASES.items():
        assert f"| {label} | {' | '.join(precision.row(case))} |" in ENGINES


@pytest.mark.parametrize(
    "file",
    [
        *("paper/cifar10", "cifar10-tf32-half", "cifar10-fp32-half"),
        *("paper/svhn", "svhn-tf32-fedavg", "svhn-fp32-fedavg", "paper/cifar100"),
    ],
)
def test_seconds_on_the_gpu(file: str) -> None:
    path = HOME / "results" / f"{file}.json"
    records = read_archive(path)
    note = json.loads(path.read_text(encoding="utf-8"))["note"]
    whole = note.partition("whole command ")[2].removesuffix(" s")
    precision, commit = records[0].config["engine"]["precision"], (records[0].versions or {})["commit"]
    assert f"| {precision} | {sum(record.seconds for record in records):.0f} | {whole} | {commit} |" in ENGINES


def test_vgg_beside_an_eager_loop() -> None:
    record = json.loads((HOME / "results" / "vgg-gpu.json").read_text(encoding="utf-8"))
    for line in record["measured"][1:]:
        assert f"deterministic | {line['round']:.2f} | {line['eager_to_this']:.1f} |" in ENGINES
    assert f"TF32 default | {record['measured'][0]['round']:.2f} | 1 |" in ENGINES
    assert record["conditions"]["code"]["commit"][:7] in ENGINES


def test_cost_of_determinism_in_other_precisions() -> None:
    record = json.loads((HOME / "results" / "vgg-precisions.json").read_text(encoding="utf-8"))
    eager, *ours = record["measured"]
    tf32, tf32_free, fp32, fp32_free = (line["round"] for line in ours)
    text = " ".join(ENGINES.split())
    assert f"the eager loop takes {eager['round']:.2f} s: tf32 {tf32:.2f} s deterministic and {tf32_free:.2f}" in text
    assert f"fp32 {fp32:.2f} and {fp32_free:.2f}." in text
    assert f"a factor of {fp32 / fp32_free:.1f} for VGG-16 in fp32" in text


def test_cost_of_algorithms_that_compute_more_than_a_step() -> None:
    record = json.loads((HOME / "results" / "step-cost-neighbours.json").read_text(encoding="utf-8"))
    ratios = {(line["algorithm"], line["engine"]): line["to_fedavg"] for line in record["measured"]}
    text = " ".join(ENGINES.split())
    assert f"MOON takes {ratios['MOON', 'stacked']:.2f} and {ratios['MOON', 'streams']:.2f} times FedAvg's" in text
    assert f"FedCurv {ratios['FedCurv', 'stacked']:.1f} and {ratios['FedCurv', 'streams']:.1f}," in text
    assert f"commit {record['conditions']['code']['commit']}; one H200" in text


def test_steps_beside_fedavg_on_the_gpu() -> None:
    record = json.loads((HOME / "results" / "step-cost-gpu.json").read_text(encoding="utf-8"))
    names = {"cnn": "CNN", "mlp": "MLP", "small": "MLP of 4,810", "vgg16": "VGG-16"}
    for model, engine in (*itertools.product(("cnn", "mlp", "small"), ("stacked", "streams")), ("vgg16", "streams")):
        lines = [line for line in record["measured"] if (line["model"], line["engine"]) == (model, engine)]
        ratios = [f"{line['to_fedavg']:.2f}" for line in lines if line["algorithm"] != "FedAvg"]
        assert f"| {names[model]}, `{engine}` | {' | '.join(ratios)} |" in ENGINES
    assert record["conditions"]["code"]["commit"] in ENGINES


def test_a_round_on_the_gpu() -> None:
    record = json.loads((HOME / "results" / "bench-gpu.json").read_text(encoding="utf-8"))
    seen = {entry["name"]: statistics.median(entry["round_seconds"]) for entry in record["contenders"]}
    stacked, streams, tight, loop = (
        f"{seen[name]:.2f} s" for name in ("fedgg-stacked", "fedgg-streams", "tight-2", "fedgg-loop")
    )
    assert f"`stacked` {stacked}, `streams` {streams}, a tight loop {tight}, fedgg's `loop` {loop}" in " ".join(
        ENGINES.split()
    )


def test_the_first_rounds_of_vgg() -> None:
    (tf32,) = read_archive(HOME / "results" / "vgg-start-tf32.json")
    (bf16,) = read_archive(HOME / "results" / "paper" / "cifar100.json")
    others = read_archive(HOME / "results" / "vgg-start-bf16.json")
    ends = [f"{100 * record.accuracy()[1][15]:.1f}%" for record in (tf32, bf16, *others)]
    text = " ".join(ENGINES.split())
    assert "{} in tf32 and {} in bf16 for seed 0, {} and {} in bf16 for seeds 1 and 2".format(*ends) in text


def test_vgg_with_batch_norm_in_three_precisions() -> None:
    curves = {
        (record.config["engine"]["precision"], record.config["seed"]): [100 * float(a) for a in record.accuracy()[1]]
        for record in read_archive(HOME / "results" / "vgg-batch-norm.json")
    }
    shown = {key: f"{curve[-1]:.1f}%" for key, curve in curves.items()}
    text = " ".join(ENGINES.split())
    first = [shown[name, 0] for name in ("fp32", "tf32", "bf16")]
    assert "{} in fp32, {} in tf32 and {} in bf16 for seed 0".format(*first) in text
    others = [shown[name, seed] for name in ("tf32", "bf16") for seed in (1, 2)]
    assert "{} and {} in tf32, {} and {} in bf16 for seeds 1 and 2".format(*others) in text
    for name in ("tf32", "bf16"):
        apart = [abs(a - b) for a, b in zip(curves[name, 0], curves["fp32", 0], strict=True)]
        assert max(apart) < 1.55, "within a point and a half"
    widest = max(max(some) - min(some) for some in zip(*(curves["tf32", seed] for seed in range(3)), strict=True))
    assert f"up to {widest:.1f} points apart" in text


def test_how_often_scaffold_diverges() -> None:
    text = (HOME / "docs" / "decisions" / "0003-scaffold-default.md").read_text(encoding="utf-8")
    runs: dict[str, dict[int, RunRecord]] = {}
    smallest = {}
    for record in read_archive(HOME / "results" / "scaffold-stability.json"):
        runs.setdefault(record.config["name"], {})[record.config["seed"]] = record
        smallest[record.config["seed"]] = min(sum(counts) for counts in (record.partition or {})["counts"])
    fedavg = runs.pop("FedAvg")
    lost_seeds = {}
    for label, by_seed in runs.items():
        behind = {seed: fedavg[seed].accuracy()[1][-1] - run.accuracy()[1][-1] for seed, run in by_seed.items()}
        lost = sorted(seed for seed, run in by_seed.items() if run.status != "finished" or behind[seed] > 0.1)
        highest = {seed: 100 * max(run.accuracy()[1]) for seed, run in by_seed.items() if seed not in lost}
        over = statistics.mean(highest[seed] - 100 * max(fedavg[seed].accuracy()[1]) for seed in highest)
        spread = f"{statistics.mean(highest.values()):.1f} ± {statistics.stdev(highest.values()):.1f}"
        correction, mean = label.split(", ")
        seeds = ", ".join(map(str, lost))
        assert f"| `{correction}`, `{mean}` | {len(lost)} | {seeds} | {spread} | {over:+.1f} |" in text
        lost_seeds[label] = set(lost)
    small = {seed for seed, examples in smallest.items() if examples < 300}
    assert small == lost_seeds["after, uniform"] == lost_seeds["exact, uniform"] - {26}
    assert smallest[26] == 777
    assert min(examples for seed, examples in smallest.items() if seed not in small) == 626


def test_seconds_beside_other_frameworks() -> None:
    record = json.loads((HOME / "results" / "bench-cpu.json").read_text(encoding="utf-8"))
    cells = [[cell.strip() for cell in line.split("|")] for line in ENGINES.splitlines() if line.count("|") == 6]
    told = {line[1]: line[2] for line in cells}
    seen = {entry["label"]: statistics.median(entry["round_seconds"]) for entry in record["contenders"]}
    common = told.keys() & seen.keys()
    assert {"fedgg workers, 2 processes", "tight loop, 2 threads", "pfl-research, 2 workers"} <= common
    for label in common:
        assert told[label] == f"{seen[label]:.2f}"


def test_the_page_of_the_papers_numbers_is_what_make_numbers_writes() -> None:
    """And prose between the blocks is kept."""
    numbers = script("paper_numbers")
    page = numbers.PAGE.read_text(encoding="utf-8")
    items = numbers.item_outputs()
    assert numbers.filled(page, items) == page
    for one in items:
        picture = HOME / "docs" / "figures" / f"paper-{one.item.name}.png"
        assert picture.exists() == (one.figure is not None)
    changed = page.replace("| SVHN |", "| spoiled |", 1).replace("## Rounds", "## Rounds\n\nBy hand.")
    assert numbers.filled(changed, items) == page.replace("## Rounds", "## Rounds\n\nBy hand.")
    with pytest.raises(UserError, match="table1"):
        numbers.filled(page.replace("<!-- table1 -->", ""), items)


def test_the_page_of_the_literature_is_what_make_numbers_writes() -> None:
    numbers = script("paper_numbers")
    page = numbers.LITERATURE.read_text(encoding="utf-8")
    assert numbers.filled(page, numbers.item_outputs(numbers.LITERATURE)) == page


def test_the_papers_protocol_in_the_text() -> None:
    """What the pages say of the five runs is what they are, beside the printed values."""
    path = HOME / "results" / "paper" / "literature-cifar10.json"
    runs = {record.config["name"].removesuffix(", beta 0.6"): record for record in read_archive(path)}
    text = " ".join((HOME / "docs" / "literature.md").read_text("utf-8").split())
    printed = {name: float(value) for name, value in PUBLISHED["literature-cifar10"][0].values["beta 0.6"].items()}
    highest = {name: 100 * max(record.accuracy()[1]) for name, record in runs.items()}
    shown = {name: f"{value:.1f}" for name, value in highest.items()}
    below = {name: f"{printed[name] - highest[name]:.1f}" for name in ("FedAvg", "SCAFFOLD", "FedCM")}
    assert "FedAvg and SCAFFOLD are {FedAvg} and {SCAFFOLD} points below the printed values".format(**below) in text
    assert f"{below['FedCM']} points below the printed value" in text
    for name, value in printed.items():
        assert name not in runs or f"{shown[name]} where {value} is" in text
    push, words = shown["FedGG, relative push"], shown["FedGG, text"]
    assert f"reaches {words} as the paper's text has it (mu 0.01)" in text
    assert f"and {push} with a relative push of 0.3" in text
    note, seconds = json.loads(path.read_text(encoding="utf-8"))["note"], runs["FedAvg"].seconds
    assert "whole command 281 s" in note
    assert "281 s from the command to the table on one H200, with an empty kernel cache, trained side by side" in text
    assert f"side by side; {seconds:.0f} s of rounds each" in text
    early = [f"{100 * runs[name].accuracy()[1][99]:.1f}" for name in ("FedCM", "FedAvg")]
    losses = [float(round_["test_loss"]) for round_ in runs["FedCM"].rounds]
    least = min(range(len(losses)), key=losses.__getitem__)
    assert "leads FedAvg after 100 rounds ({} and {} %)".format(*early) in text
    assert f"least in round {least + 1} ({losses[least]:.2f}) and rises to {losses[-1]:.2f}" in text
    ends = [f"{runs[name].rounds[-1]['train_loss']:.2f}" for name in ("FedCM", "FedAvg", "SCAFFOLD")]
    assert "at the end is {}, where FedAvg's is {} and SCAFFOLD's {}".format(*ends) in text


def test_costs_beside_the_literature() -> None:
    """The table of costs is what the algorithms are measured to send, store and compute."""
    page = (HOME / "docs" / "literature.md").read_text(encoding="utf-8")
    named: dict[str, Algorithm] = {kind.__name__: kind() for kind in ALGORITHMS.values()}
    named |= {"FedGG, text": FedGG(), "FedGG, direction sent": FedGG(direction="sent")}
    lines = [line for line in page.partition("| backward passes a step |")[2].splitlines()[2:] if line.startswith("|")]
    assert len(lines) == 18
    for line in lines:
        algorithm = named[line.split("|")[1].strip()]
        cost = cost_of(algorithm)
        states = (", ".join(names) or "none" for names in (cost.client, cost.server))
        passes = 1 + int(algorithm.step_passes // 3)
        cells = [str(passes), f"{cost.arithmetic:.3g}", f"{cost.bytes:g}", *states]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == cells


def test_steps_beside_fedavg() -> None:
    record = json.loads((HOME / "results" / "step-cost-cpu.json").read_text(encoding="utf-8"))
    for label, model in (("CNN", "cnn"), ("MLP", "mlp"), ("MLP", "small")):
        lines = [line for line in record["measured"] if line["model"] == model]
        ratios = [f"{line['to_fedavg']:.2f}" for line in lines if line["algorithm"] != "FedAvg"]
        assert f"| {label}, {lines[0]['parameters']:,} | {' | '.join(ratios)} |" in ENGINES
    assert record["conditions"]["code"]["commit"][:7] in ENGINES


def test_steps_of_optimisers_beside_fedavg() -> None:
    names = ("step-cost-optimisers", "step-cost-optimisers-before")
    now, before = (json.loads((HOME / "results" / f"{name}.json").read_text(encoding="utf-8")) for name in names)
    for label, model in (("CNN", "cnn"), ("MLP", "mlp"), ("MLP", "small")):
        pairs = [
            (line, earlier)
            for line, earlier in zip(now["measured"], before["measured"], strict=True)
            if line["model"] == model and line["algorithm"] != "FedAvg"
        ]
        ratios = [f"{line['to_fedavg']:.2f} ({earlier['to_fedavg']:.2f})" for line, earlier in pairs]
        assert f"| {label}, {pairs[0][0]['parameters']:,} | {' | '.join(ratios)} |" in ENGINES
    assert all(record["conditions"]["code"]["commit"][:7] in ENGINES for record in (now, before))


# Building blocks -----------------------------------------------------------------------------------------------------

BLOCKS = json.loads((HOME / "results" / "building-blocks.json").read_text(encoding="utf-8"))


def _personal_table() -> str:
    accuracy = BLOCKS["personal"]["accuracy"]
    reference = accuracy["fedavg holdout"]
    lines = ["| method | accuracy % | minus FedAvg's global model |", "| --- | --- | --- |"]
    titles = {"fedavg holdout": "FedAvg, the global model", "fedper": "FedPer", "fedrep": "FedRep", "ditto": "Ditto"}
    for method, title in {**titles, "local": "local training"}.items():
        values = [100 * value for value in accuracy[method]]
        differences = [value - 100 * other for value, other in zip(values, reference, strict=True)]
        half = scipy.stats.t.ppf(0.975, 2) * statistics.stdev(differences) / len(differences) ** 0.5
        shown = "" if method == "fedavg holdout" else f"{statistics.mean(differences):+.1f} ± {half:.1f}"
        lines.append(f"| {title} | {statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} | {shown} |")
    return "\n".join(lines)


def _shakespeare_table() -> str:
    lines = [
        "| model, clients' optimiser | rounds | accuracy % after 100 | at the end | perplexity | seconds a round |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in BLOCKS["shakespeare"]["runs"].values():
        accuracy = {int(number): 100 * value for number, value in run["test_accuracy"].items()}
        cells = (run["title"], run["rounds"], f"{accuracy[100]:.1f}", f"{accuracy[run['rounds']]:.1f}")
        lines.append("| " + " | ".join(map(str, (*cells, run["test_perplexity"], run["seconds_a_round"]))) + " |")
    return "\n".join(lines)


def _participation_table() -> str:
    highest: dict[str, dict[int, float]] = {}
    megabytes: dict[str, float] = {}
    for record in read_archive(HOME / "results" / "participation.json"):
        label = record.config["name"]
        highest.setdefault(label, {})[record.config["seed"]] = 100 * max(record.accuracy()[1])
        megabytes[label] = float(record.megabytes()[-1]) / len(record.rounds)
    lines = [
        "| setting | 3 of 100 | over FedAvg | 10 of 100 | over FedAvg | all 100 | over FedAvg | MB, 10 of 100 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    settings = dict.fromkeys(label.rpartition(", ")[0] for label in highest)
    for setting in sorted(settings, key=lambda name: name != "FedAvg"):
        cells = []
        for cohort in ("3", "10", "100"):
            if f"{setting}, {cohort}" not in highest:  # with all clients in every round both directions are the same
                cells += ["as received", ""]
                continue
            ours, fedavg = highest[f"{setting}, {cohort}"], highest[f"FedAvg, {cohort}"]
            over = [ours[seed] - fedavg[seed] for seed in sorted(fedavg)]
            half = scipy.stats.t.ppf(0.975, len(over) - 1) * statistics.stdev(over) / len(over) ** 0.5
            cells.append(f"{statistics.mean(ours.values()):.1f} ± {statistics.stdev(ours.values()):.1f}")
            cells.append("" if setting == "FedAvg" else f"{statistics.mean(over):+.1f} ± {half:.1f}")
        lines.append(f"| {setting} | {' | '.join(cells)} | {megabytes[f'{setting}, 10']:.1f} |")
    return "\n".join(lines)


def _lead_by_rounds_table() -> str:
    """Over FedAvg: mean test accuracy over ranges of rounds, paired by seed."""
    spans = [(0, 10), (10, 20), (20, 30), (30, 50), (50, 70), (70, 100)]
    methods = ("FedGG mu 0.1", "FedGG mu 1", "FedGG relative push 0.3", "FedAvgM 0.5")
    rows = [
        (
            f"paper's, Dirichlet {beta}: {method.removeprefix('FedGG ')}",
            f"{method}, beta {beta}",
            f"FedAvg, beta {beta}",
        )
        for beta in (0.5, 0.1)
        for method in methods
    ]
    rows += [
        ("for a CPU, all of 100 clients: mu 1", "mu 1, received, 100", "FedAvg, 100"),
        ("for a CPU, 10 of 100 clients: mu 1", "mu 1, received, 10", "FedAvg, 10"),
    ]
    curves: dict[str, dict[int, list[float]]] = {}
    for file in ("paper/cifar10", "paper/readings-05", "paper/readings-01", "participation"):
        for record in read_archive(HOME / "results" / f"{file}.json"):
            rounds, accuracy = record.accuracy()
            means = [100 * float(accuracy[(rounds > start) & (rounds <= end)].mean()) for start, end in spans]
            curves.setdefault(record.config["name"], {})[record.config["seed"]] = means
    head = ["protocol and setting", *(f"rounds {start + 1} to {end}" for start, end in spans), "FedAvg at the end"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for title, label, reference in rows:
        cells = []
        for span in range(len(spans)):
            over = [curves[label][seed][span] - curves[reference][seed][span] for seed in sorted(curves[reference])]
            half = scipy.stats.t.ppf(0.975, len(over) - 1) * statistics.stdev(over) / len(over) ** 0.5
            cells.append(f"{statistics.mean(over):+.1f} ± {half:.1f}")
        cells.append(f"{statistics.mean(means[-1] for means in curves[reference].values()):.1f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cpu_protocol_table() -> str:
    """Six methods of `fedgg reproduce literature-cpu` and `literature-cpu-cifar100`."""
    rows = {
        "FedAvg": "FedAvg",
        "FedAvgM (server momentum)": "FedAvgM",
        "FedACG": "FedACG",
        "FedCM, 1.5 times the traffic": "FedCM",
        "FedGG, direction sent, 1.5 times the traffic": "FedGG, text, direction sent",
        "FedGG, relative push": "FedGG, relative push",
    }
    columns = {"CIFAR-10, Dirichlet 0.6": "0.6", "CIFAR-10, Dirichlet 0.1": "0.1", "CIFAR-100, Dirichlet 0.1": "0.1"}
    files = [["literature-cpu-06"], ["literature-cpu", "literature-cpu-seeds-3-4"], ["literature-cpu-cifar100"]]
    cells: dict[str, list[str]] = {title: [] for title in rows}
    heads = []
    for (head, beta), names in zip(columns.items(), files, strict=True):
        highest: dict[str, dict[int, float]] = {}
        for record in itertools.chain(*(read_archive(HOME / "results" / "paper" / f"{name}.json") for name in names)):
            highest.setdefault(record.config["name"], {})[record.config["seed"]] = 100 * max(record.accuracy()[1])
        fedavg = highest[f"FedAvg, beta {beta}"]
        heads.append(f"{head}, {len(fedavg)} seeds")
        for title, method in rows.items():
            ours = highest[f"{method}, beta {beta}"]
            over = [ours[seed] - fedavg[seed] for seed in sorted(fedavg)]
            half = scipy.stats.t.ppf(0.975, len(over) - 1) * statistics.stdev(over) / len(over) ** 0.5
            difference = "" if method == "FedAvg" else f" ({statistics.mean(over):+.1f} ± {half:.1f})"
            cells[title].append(f"{statistics.mean(ours.values()):.1f}{difference}")
    lines = [f"| | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    return "\n".join([*lines, *(f"| {title} | {' | '.join(values)} |" for title, values in cells.items())])


@pytest.mark.parametrize(
    ("page", "name", "table"),
    [
        ("../README.md", "cpu-protocol", _cpu_protocol_table),
        ("personal.md", "personal", _personal_table),
        ("tasks.md", "shakespeare", _shakespeare_table),
        ("literature.md", "participation", _participation_table),
        ("literature.md", "lead-by-rounds", _lead_by_rounds_table),
    ],
)
def test_tables_of_results(page: str, name: str, table: Callable[[], str]) -> None:
    text = (HOME / "docs" / page).read_text(encoding="utf-8")
    shown = text.partition(f"<!-- {name}: begin (this is generated) -->")[2].partition(f"<!-- {name}: end -->")[0]
    assert shown.strip() == table().strip()


def test_resnet18() -> None:
    text = " ".join((HOME / "docs" / "parts.md").read_text(encoding="utf-8").split())
    record = BLOCKS["resnet18"]
    accuracy = {number: f"{100 * value:.1f} %" for number, value in record["test_accuracy"].items()}
    measured = (
        f"{accuracy['100']} after 100 rounds and {accuracy['120']} after 120, {record['seconds_a_round']:.1f} s a round"
    )
    assert measured in text
    assert record["conditions"].partition("commit ")[2][:7] in text
