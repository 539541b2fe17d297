"""Learning curves and a table from the logs of finished runs, one panel and one row per task and script.

python benchmark/curves.py runs --output docs/figures/breakout     # writes breakout.png and breakout.csv, prints the table
"""

import csv
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.common import fail, make_folder

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"]  # Okabe and Ito, for all eyes
ROWS = {
    "charts/episodic_return": "score of 100 episodes",
    "return_model/explained_variance": "explained variance",
    "return_model/coverage_80": "coverage of 80 %",
}


@dataclass
class Args:
    runs: tyro.conf.Positional[Path]
    """the folder that holds the runs' folders"""
    output: Path = Path("curves")
    """where to write, without ending"""
    last: int = 10
    """training batches that the table's end values are averaged over"""


def read(folder):
    """Curves {tag: (steps, values)} of a run, and its record."""
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    curves = {tag: np.array([(event.step, event.value) for event in log.Scalars(tag)]).T for tag in log.Tags()["scalars"]}
    if "charts/episodic_return" in curves:
        steps, scores = curves["charts/episodic_return"]
        sums = np.cumsum(np.concatenate([[0], scores]))
        ends = np.arange(1, len(scores) + 1)
        starts = np.maximum(ends - 100, 0)
        curves["charts/episodic_return"] = np.array([steps, (sums[ends] - sums[starts]) / (ends - starts)])
        curves["last scores"] = scores[-100:]
    return curves, json.loads((folder / "run.json").read_text())


def main(args):
    tasks = defaultdict(list)
    for folder in sorted(path.parent for path in args.runs.glob("*/run.json")):
        curves, record = read(folder)
        if set(ROWS) <= set(curves):
            tasks[f"{record['args']['env_id']}\n{Path(record['script']).stem}"].append((curves, record))
        else:
            print(f"skipped {folder}: it has no log with scores (of kept copies benchmark/plot.py draws curves)", file=sys.stderr)
    if not tasks:
        fail(f"there is no run with results in {args.runs}.")

    plt.rcParams.update({"font.size": 13, "axes.prop_cycle": plt.cycler(color=COLOURS)})
    figure, axes = plt.subplots(
        len(ROWS), len(tasks), figsize=(1 + 3.2 * len(tasks), 7), sharex="col", squeeze=False, layout="constrained"
    )
    table, several = [], len({task.split("\n")[1] for task in tasks}) > 1
    for column, (task, runs) in enumerate(tasks.items()):
        for curves, record in runs:
            seed = record["args"]["seed"]
            for axis, tag in zip(axes[:, column], ROWS, strict=True):
                axis.plot(curves[tag][0] / 1e3, curves[tag][1], lw=1.3, alpha=0.85, label=f"seed {seed}")
            ends = {tag: curves[tag][1, -args.last :].mean() for tag in list(ROWS)[1:]}
            final = curves["last scores"]
            table.append([*task.split("\n"), seed, int(curves["losses/policy"][0, -1]), final.mean(), final.std(), *ends.values()])
        axes[0, column].set_title(task if several else task.split("\n")[0])
        axes[-1, column].set_xlabel("agent steps (thousands)")
        axes[1, column].set_ylim(-0.25, 1.02)
        axes[2, column].set_ylim(0, 1)
        axes[2, column].axhline(0.8, color="black", lw=0.8, ls=":")
    for row, label in zip(axes[:, 0], ROWS.values(), strict=True):
        row.set_ylabel(label)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)

    make_folder(args.output.parent)
    figure.savefig(args.output.with_name(f"{args.output.name}.png"), dpi=110)
    header = ["task", "script", "seed", "steps", "score", "score_std", "explained_variance", "coverage_80"]
    with open(args.output.with_name(f"{args.output.name}.csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows([[f"{value:.4g}" if isinstance(value, float) else value for value in row] for row in table])
    print("| task | seed | steps | score, last 100 episodes | explained variance | coverage of 80 % |", "|---" * 6 + "|", sep="\n")
    for task, script, seed, steps, score, std, explained, coverage in table:
        name = f"{task}, {script}" if several else task
        print(f"| {name} | {seed} | {steps:,} | {score:.0f} ± {std:.0f} | {explained:.3f} | {coverage:.2f} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
