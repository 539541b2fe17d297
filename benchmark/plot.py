"""Draws and compares runs: learning curves, scores with intervals, and which method is likely to beat which.

    python benchmark/plot.py results/mujoco-figure
    python benchmark/plot.py runs --output figures --curves return coverage_80

Takes folders of results and runs' own folders, at any depth. Writes a PNG for each of --curves (mean and standard
deviation over seeds, averaged over the paper's intervals) and a page of tables in Markdown. The final score of a run
is the mean of its last 100 training episodes. Intervals are 95 % bootstraps that redraw the seeds of each task and keep
the tasks (Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", 2021).
"""

import itertools
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.common import FREE, fail, interval_steps, make_folder, read_results, read_run, start, table

METHODS = {"bdpg": "BDPG", "ppo_wgan": "PPO+WGAN", "ppo_qr": "PPO+QR", "ppo": "PPO"}
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito, for all eyes
LINES = ["-", "--", "-.", ":"]  # and for prints without colour
MOST_METHODS = 12  # in one picture
NUM_RESAMPLES = 10_000
# What others report for PPO. MuJoCo: older versions of the tasks; the Zoo has settings of its own for most tasks and
# plays the mean action, Tianshou reports the best score on the way. Atari: 10M agent steps; random and human play from
# Wang et al. 2016, "Dueling network architectures".
PUBLISHED = {
    ("CleanRL, v4, 1M", "SB3 Zoo, v3, 1M, one run", "Tianshou, best within 1M"): {
        "Ant-v5": ("(8M: 1824 ± 906)", "1327", "3258"),
        "HalfCheetah-v5": ("1443 ± 46", "5819", "5784"),
        "Hopper-v5": ("2383 ± 272", "2410", "2609"),
        "InvertedDoublePendulum-v5": ("(8M: 5626 ± 289)", "", "9231"),
        "Swimmer-v5": ("(8M: 125 ± 22)", "282", "66.7"),
        "Walker2d-v5": ("2288 ± 572", "3479", "3589"),
        "Humanoid-v5": ("716 ± 49", "", "787"),
        "InvertedPendulum-v5": ("963 ± 22", "", "1000"),
        "Reacher-v5": ("(8M: -4.65 ± 0.96)", "", "-4.1"),
    },
    ("CleanRL, 10M", "OpenAI Baselines, 10M", "random play", "a human"): {
        "Asterix": ("4820 ± 1092", "3739 ± 745", "210", "8503"),
        "BeamRider": ("2478 ± 337", "2836 ± 388", "364", "16927"),
        "Breakout": ("430 ± 8", "406 ± 11", "1.7", "30.5"),
        "Freeway": ("33.1 ± 0.3", "33.0 ± 0.4", "0", "29.6"),
        "Hero": ("26430 ± 925", "24747 ± 3530", "1027", "30826"),
        "Pong": ("20.4 ± 0.2", "20.5 ± 0.8", "-20.7", "14.6"),
        "Qbert": ("17246 ± 605", "15228 ± 921", "164", "13455"),
        "Seaquest": ("1240 ± 419", "1518 ± 400", "68.4", "42055"),
        "Venture": ("0 ± 0", "109 ± 62", "0", "1188"),
    },
}


@dataclass
class Args:
    folders: tyro.conf.Positional[tuple[Path, ...]]
    """folders that hold results or runs"""
    output: Optional[Path] = None
    """the folder to write into (default: the first of the folders)"""
    curves: tuple[str, ...] = ("return",)
    """what to draw: return, explained_variance, coverage_80, and what else the runs' CSV files have"""


def note(message):
    print(message, file=sys.stderr)


# --- reading ---


def identity(record):
    """The arguments that make a method, without those that name a run or say where and what it logs."""
    return {name: value for name, value in record["args"].items() if name not in (*FREE, "env_id", "seed")}


def read_runs(folders):
    """All runs that have a score; of the same run in two places the longer one. What is damaged or short is named."""
    runs = []
    for folder in folders:
        for path in sorted(folder.resolve().rglob("runs.json")):
            runs += read_results(path.parent)
        for path in sorted(folder.resolve().rglob("run.json")):
            try:
                runs.append(read_run(path.parent))
            except (ValueError, KeyError, TypeError, AttributeError):  # no JSON, or not what the scripts write
                note(f"skipped {path.parent}: its run.json is damaged")
    found, longest = {}, defaultdict(int)
    for run in sorted(runs, key=lambda run: -run.record["steps"]):
        args = run.record["args"]
        run.task, run.seed, run.end, run.score = args["env_id"], args["seed"], run.record["steps"], run.record["score"]
        key = (run.task, run.seed, run.record["script"], str(sorted(identity(run.record).items())))
        if run.score is None:
            note(f"skipped {run.folder}: no episode has ended yet")
        elif key in found:
            note(f"skipped {run.folder}: the same run is in {found[key].folder}")
        else:
            found[key] = run
            longest[run.task] = max(longest[run.task], run.end)
    for key, run in list(found.items()):
        if run.end < 0.95 * longest[run.task]:
            note(f"skipped {run.folder}: it ends at step {run.end:,}, others of {run.task} at {longest[run.task]:,}")
            del found[key]
    if not found:
        fail(f"there is no run with scores in {', '.join(map(str, folders))}.")
    return sorted(found.values(), key=lambda run: (run.task, run.seed))


def name_methods(runs):
    """Sets run.method: the paper's name, and the arguments in which runs of that name differ. All names, in order."""
    groups = defaultdict(list)
    for run in runs:
        script = Path(run.record["script"]).stem
        name = METHODS.get(script.rpartition("_")[0], script)
        naive = " naive" if run.record["args"].get("eta") == 0 else ""
        groups[name + naive, script].append((run, identity(run.record)))
    for (name, _), group in groups.items():
        arguments = dict.fromkeys(argument for _, args in group for argument in args)
        varied = [argument for argument in arguments if len({args.get(argument) for _, args in group}) > 1]
        if "bootstrap_length" in varied and "num_steps" in varied:
            varied.remove("num_steps")  # it follows from k
        for run, args in group:
            run.method = ", ".join([name, *(f"{argument} {args.get(argument)}" for argument in varied)])
    order = [*METHODS.values()]
    first = {run.method: run.method.split(",")[0].split(" ")[0] for run in runs}
    return sorted(first, key=lambda method: (order.index(first[method]) if first[method] in order else 9, method))


def averaged(run, column):
    """A curve as the paper draws it: means over its intervals, as (steps, values). An interval that the run has not
    completed counts only if it is the only one."""
    steps = run.table["step"]
    values = run.table.get(column, np.full(len(steps), np.nan))
    weights = np.where(np.isnan(values), 0, run.table["episodes"] if column == "return" else 1)
    interval = interval_steps(run.record)
    number = np.ceil(steps / interval).astype(int) - 1
    with np.errstate(invalid="ignore"):
        means = np.bincount(number, weights * np.nan_to_num(values)) / np.bincount(number, weights)
    return interval * np.arange(1, 1 + len(means)), means[: max(1, run.end // interval)]


# --- statistics ---


def resample(scores, rng):
    """Bootstrap: as many runs again, drawn from those of one task with replacement, NUM_RESAMPLES times."""
    return scores[rng.integers(len(scores), size=(NUM_RESAMPLES, len(scores)))]


def interval(resampled, tasks):
    """The central 95 % of a bootstrap; nothing if a task has a single run, which all resamples would repeat."""
    single = any(len(scores) < 2 for scores in tasks)
    return (np.nan, np.nan) if single else tuple(np.quantile(resampled, [0.025, 0.975]))


def mean_interval(tasks):
    """Mean over tasks of their mean scores, and its interval. `tasks` has an array of scores for each task."""
    rng = np.random.default_rng(0)
    resampled = np.mean([resample(scores, rng).mean(1) for scores in tasks], axis=0)
    return np.mean([scores.mean() for scores in tasks]), *interval(resampled, tasks)


def improvement_interval(pairs):
    """Probability that a run of X beats a run of Y on a task drawn at random, ties counting half, and its interval."""
    rng = np.random.default_rng(0)

    def wins(x, y):
        x, y = x[..., :, None], y[..., None, :]
        return ((x > y) + 0.5 * (x == y)).mean((-2, -1))

    resampled = np.mean([wins(resample(x, rng), resample(y, rng)) for x, y in pairs], axis=0)
    return np.mean([wins(x, y) for x, y in pairs]), *interval(resampled, itertools.chain(*pairs))


# --- output ---


def short(task):
    return task.removesuffix("NoFrameskip-v4")


def draw_curves(runs, tasks, methods, column, path):
    """Mean and standard deviation over seeds, a panel for each task."""
    rows = -(-len(tasks) // 4)
    columns = -(-len(tasks) // rows)  # six panels in two rows of three, not in one of four and one of two
    size = (max(3.4 * columns, 5.6), 0.8 + 2.9 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, task in itertools.zip_longest(axes.flat, tasks):
        if task is None:
            axis.remove()
            continue
        for index, method in enumerate(methods):
            curves = [averaged(run, column) for run in runs if (run.task, run.method) == (task, method)]
            length = min((len(values) for _, values in curves), default=0)
            values = np.ma.masked_invalid([values[:length] for _, values in curves])
            if not values.count():
                continue
            steps, mean = curves[0][0][:length] / 1e6, values.mean(0)
            std = values.std(0, ddof=1) if len(curves) > 1 else 0
            style = {"color": COLOURS[index % len(COLOURS)]}
            axis.plot(steps, mean, LINES[index % len(LINES)], lw=2, label=method, **style)
            axis.fill_between(steps, mean - std, mean + std, alpha=0.2, lw=0, **style)
        axis.set(title=short(task), xlabel="agent steps (millions)")
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(column.replace("_", " "))
    handles = {
        label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    labels = [method for method in methods if method in handles]  # a task may lack some
    for number in range(min(5, len(labels)), 0, -1):  # as many side by side as fit
        lines = [handles[label] for label in labels]
        legend = figure.legend(lines, labels, loc="outside lower center", ncols=number, frameon=False)
        if legend.get_window_extent().width < figure.bbox.width or number == 1:
            break
        legend.remove()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def markdown(header, rows):
    def text(cell):
        if isinstance(cell, float):
            return "" if cell != cell else f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
        return str(cell)

    return table(header, [[text(cell) for cell in row] for row in rows])


def mean_and_std(scores):
    places = 0 if abs(scores.mean()) >= 100 else 1
    return f"{scores.mean():.{places}f}" + (f" ± {scores.std(ddof=1):.{places}f}" if len(scores) > 1 else "")


def last(run, column):
    """What was logged in the last of the paper's intervals; nan if nothing was."""
    return averaged(run, column)[1][-1]


def make_tables(runs, tasks, methods):
    """Scores beside published ones; single runs and intervals; probabilities of improvement."""
    of = {(t, m): [run for run in runs if (run.task, run.method) == (t, m)] for t in tasks for m in methods}
    scores = {key: np.array([run.score for run in group]) for key, group in of.items() if group}
    beside = [columns for columns, known in PUBLISHED.items() if any(short(task) in known for task in tasks)]
    rows = []
    for task in tasks:
        own = [mean_and_std(scores[task, method]) if (task, method) in scores else "" for method in methods]
        others = [PUBLISHED[columns].get(short(task), [""] * len(columns)) for columns in beside]
        rows.append([short(task), *own, *itertools.chain(*others)])
    text = markdown(["task", *methods, *itertools.chain(*beside)], rows)

    rows = []
    for (task, method), values in scores.items():
        group = sorted(of[task, method], key=lambda run: run.seed)
        mean, low, high = mean_interval([values])
        std = values.std(ddof=1) if len(values) > 1 else np.nan
        single = ", ".join(f"{run.score:.4g}" for run in group)
        critic = (np.mean([last(run, name) for run in group]) for name in ("explained_variance", "coverage_80"))
        rows.append([short(task), method, len(group), mean, std, low, high, single, *critic])
    # All tasks together, in units of PPO's mean score, which the intervals take as given.
    paid = [task for task in tasks if (task, "PPO") in scores and scores[task, "PPO"].mean() > 0]
    for method in methods:
        if len(paid) > 1 and all((task, method) in scores for task in paid):
            relative = [scores[task, method] / scores[task, "PPO"].mean() for task in paid]
            mean, low, high = mean_interval(relative)
            name = f"{len(paid)} tasks (PPO: 1)"
            rows.append([name, method, sum(map(len, relative)), mean, np.nan, low, high, "", np.nan, np.nan])
    header = ["task", "method", "runs", "mean", "std", "95 % from", "to", "single runs"]
    text += "\n" + markdown([*header, "explained variance", "coverage of 80 %"], rows)

    rows = []
    for x, y in itertools.combinations(methods, 2):
        pairs = [(scores[t, x], scores[t, y]) for t in tasks if (t, x) in scores and (t, y) in scores]
        if pairs:
            rows.append([f"{x} > {y}", len(pairs), *map(float, improvement_interval(pairs))])
    if rows:
        text += "\n" + markdown(["a run beats one of the other", "tasks", "probability", "95 % from", "to"], rows)
    return text


def made_with(runs):
    """How many runs, of what seeds, commits and versions, and how long they took."""
    records = [run.record for run in runs]
    commits = dict.fromkeys(str(record["git"])[:7] for record in records)
    versions = dict.fromkeys(" ".join(item) for record in records for item in record["versions"].items())
    hours = [record["seconds"] / 3600 for record in records if record["seconds"]]
    steps = sorted({run.end for run in runs})
    parts = [f"{len(runs)} runs of {' to '.join(f'{step:,}' for step in dict.fromkeys((steps[0], steps[-1])))} steps"]
    parts += [f"seeds {', '.join(map(str, sorted({run.seed for run in runs})))}", f"commits {', '.join(commits)}"]
    parts += [", ".join(versions), f"{np.mean(hours):.2g} hours a run, {sum(hours):.2g} together" if hours else ""]
    return "; ".join(filter(None, parts)) + "."


def main(args):
    if not args.folders:
        fail("give folders of results or runs.")
    for folder in args.folders:
        if not folder.is_dir():
            fail(f"there is no folder {folder}.")
    runs = read_runs(args.folders)
    known = sorted({column for run in runs for column in run.table} - {"step", "episodes"})
    for column in args.curves:
        if column not in known:
            fail(f"no run has {column}; there are: {', '.join(known)}.")
    methods, tasks = name_methods(runs), sorted({run.task for run in runs})
    output = args.output or args.folders[0]
    make_folder(output)
    plt.rcParams.update({"font.size": 13, "axes.titlesize": "medium"})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    for column in args.curves:
        if len(methods) > MOST_METHODS:
            note(f"no curves: {len(methods)} methods are more than a picture can show; give folders with fewer of them")
            break
        draw_curves(runs, tasks, methods, column, output / f"{column}.png")
    text = f"{make_tables(runs, tasks, methods)}\n{made_with(runs)}\n"
    (output / "tables.md").write_text(text)
    print(f"wrote {output / 'tables.md'}:\n\n{text}")


if __name__ == "__main__":
    start(main, Args, __doc__)
