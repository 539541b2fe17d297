"""Pictures and tables from the TensorBoard logs of runs: learning curves, scores with intervals, maps of the ablation.

    python benchmark/plot.py runs/mujoco-figure --output docs/figures/mujoco
    python benchmark/plot.py runs --tags charts/averaged_score return_model/coverage_80
    python benchmark/plot.py runs/ablation --maps-at 10000000 150000000
    python benchmark/plot.py runs/mujoco-figure --keep benchmark/results/mujoco       # the runs, small enough for a repository

Every picture comes as PNG and SVG with the numbers behind it as CSV, and a table in Markdown. What is what: docs/benchmark.md.
"""

import csv
import difflib
import itertools
import json
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tyro
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.common import FREE, fail, make_folder, start, table

SCORE, SPEED = "charts/averaged_score", "charts/steps_per_second"
FINAL = {"score": SCORE, "explained variance": "return_model/explained_variance", "coverage of 80 %": "return_model/coverage_80"}
AXES = {SCORE: "averaged score (rewards)", FINAL["coverage of 80 %"]: "share in the 80 % interval"}  # others: the tag's name
METHODS = {"bdpg": "BDPG", "ppo_wgan": "PPO+WGAN", "ppo_qr": "PPO+QR", "ppo_scalar": "PPO, scalar critic"}
# Scores of a random player and of a human tester after up to 30 no-ops: Wang et al. 2016, "Dueling network architectures", raw
# scores in the appendix; the same numbers are in DeepMind's dqn_zoo/atari_data.py.
HUMAN = {
    "Asterix": (210.0, 8503.3),
    "BeamRider": (363.9, 16926.5),
    "Breakout": (1.7, 30.5),
    "Freeway": (0.0, 29.6),
    "Hero": (1027.0, 30826.4),
    "Qbert": (163.9, 13455.0),
    "Seaquest": (68.4, 42054.7),
    "Venture": (0.0, 1187.5),
}
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito, for all eyes
LINES = ["-", "--", "-.", ":"]  # and for prints without colour
NUM_RESAMPLES = 10_000
MOST_METHODS = 12  # in one picture
KEPT = "curves.csv"  # of a run that --keep copied


@dataclass
class Args:
    folders: tyro.conf.Positional[tuple[Path, ...]]
    """folders that hold runs, at any depth"""
    output: Path = Path("figures/figure")
    """where to write, without ending"""
    tags: tuple[str, ...] = (SCORE,)
    """what to draw curves of"""
    final: float = 0.1
    """share of the steps, in (0, 1], whose scores make up the final score of a run: the last ones"""
    maps_at: tuple[int, ...] = ()
    """instead of curves, maps over k and ū of the scores at these steps"""
    keep: Optional[Path] = None
    """also copy the runs into this folder, where they can be plotted from: run.json, and the curves of --tags and of all
    that is in the table"""


def note(message):
    print(message, file=sys.stderr)


# --- reading ---


def read_curves(folder):
    """All scalars that a run logged, {tag: array of (steps, values)}. What is damaged is named and skipped."""
    points = defaultdict(dict)
    if (folder / KEPT).exists():
        with open(folder / KEPT, newline="") as file:
            try:
                for tag, step, value in itertools.islice(csv.reader(file), 1, None):
                    points[tag][float(step)] = [float(value)]
            except (ValueError, csv.Error):
                note(f"skipped the end of {folder / KEPT}: it is damaged")
    for path in sorted(folder.glob("events.out.tfevents.*")):  # their names begin with the time
        size, size_read = path.stat().st_size, 0
        for record in RawEventFileLoader(str(path)).Load():
            size_read += len(record) + 16  # with its length and checksums
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:  # a resumed run: what had been logged after its checkpoint is void
                for curve in points.values():
                    for step in [step for step in curve if step >= event.step]:
                        del curve[step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    points[value.tag].setdefault(event.step, []).append(value.simple_value)
        if size == 0 or size_read < size:
            note(f"skipped {'all' if size_read == 0 else 'the end'} of {path}: {'it is empty' if size == 0 else 'it breaks off'}")
    return {tag: np.array([(step, np.mean(values)) for step, values in sorted(curve.items())]).T for tag, curve in points.items()}


def read_runs(folders):
    """The runs with scores; of several with the same arguments the one that got furthest."""
    runs = {}
    for path in sorted({path for folder in folders for path in folder.resolve().rglob("run.json")}):
        try:
            record = json.loads(path.read_text())
            key, script, args = run_key(record), Path(record["script"]).stem, record["args"]
        except (ValueError, KeyError, TypeError, AttributeError):  # no JSON, or not what the scripts write
            note(f"skipped {path.parent}: its run.json is damaged")
            continue
        curves = {tag: curve for tag, curve in read_curves(path.parent).items() if curve.size}
        if SCORE not in curves:
            note(f"skipped {path.parent}: it has no averaged score yet")
            continue
        run = SimpleNamespace(folder=path.parent, record=record, script=script, args=args, curves=curves)
        run.end = max(curve[0, -1] for curve in curves.values())
        runs.setdefault(key, []).append(run)
    if not runs:
        fail(f"there is no run with scores in {', '.join(map(str, folders))}.")
    for same in runs.values():
        same.sort(key=lambda run: (run.end, len(run.curves)), reverse=True)
        for run in same[1:]:
            note(f"skipped {run.folder}: the same run is in {same[0].folder}, and got as far or further there")
    return [same[0] for same in runs.values()]


def keep(run, tags, folder):
    """A copy of the run that is small enough for a repository, with the tags that an earlier copy has."""
    folder = folder / run.folder.name
    if folder.resolve() == run.folder.resolve():
        fail(f"{folder.parent} holds these runs already; choose another folder for --keep.")
    make_folder(folder)
    record = (run.folder / "run.json").read_text().replace(f"{Path.cwd()}/", "")  # where it lay here says nothing elsewhere
    if (folder / "run.json").exists() and run_key(json.loads((folder / "run.json").read_text())) != run_key(run.record):
        fail(f"{folder} is of another run than {run.folder}; choose another folder for --keep.")
    (folder / "run.json").write_text(record)
    tags = dict.fromkeys([*tags, *(read_curves(folder) if (folder / KEPT).exists() else ())])
    rows = [(tag, f"{step:.0f}", f"{value:.5g}") for tag in tags if tag in run.curves for step, value in run.curves[tag].T]
    rows.append(("end", f"{run.end:.0f}", 0))  # which may be after the last averaged score
    with open(folder / KEPT, "w", newline="") as file:
        csv.writer(file).writerows([("tag", "step", "value"), *rows])


def run_key(record):
    """What two runs that are the same have in common."""
    args = record["args"]
    return record["script"], json.dumps(identity(args) | {name: args[name] for name in ("env_id", "seed")}, sort_keys=True)


def identity(args):
    """The arguments that make a method, without those that name a run or say where and what it logs."""
    return {name: value for name, value in args.items() if name not in (*FREE, "env_id", "seed")}


def name_methods(runs):
    """Sets run.method: the paper's name, and the arguments in which runs of that name differ. Returns all names in order."""
    groups = defaultdict(list)
    for run in runs:
        name = METHODS.get(run.script.rsplit("_", 1)[0], run.script)
        groups[name + (" naive" if run.args.get("eta") == 0 else ""), run.script].append(run)
    for (name, _), group in groups.items():
        arguments = dict.fromkeys(argument for run in group for argument in identity(run.args))
        varied = [argument for argument in arguments if len({run.args.get(argument) for run in group}) > 1]
        if "bootstrap_length" in varied and "num_steps" in varied:
            varied.remove("num_steps")  # it follows from k
        for run in group:
            run.method = ", ".join([name, *(f"{argument} {run.args.get(argument)}" for argument in varied)])
    order = {run.method: [not run.script.startswith(family) for family in METHODS] for run in runs}  # as METHODS, then the rest
    return sorted(order, key=lambda method: (order[method], method))


# --- statistics ---


def spread(values):
    """Standard deviation over runs; a single one has none."""
    return values.std(0, ddof=1) if len(values) > 1 else np.nan * values[0]


def iqm(scores):
    """Interquartile mean along the last axis: the mean without the lowest and the highest quarter."""
    cut = scores.shape[-1] // 4
    return np.sort(scores)[..., cut : scores.shape[-1] - cut].mean(-1)


def resample(scores, rng):
    """Bootstrap: as many runs again, drawn from those of one task with replacement, NUM_RESAMPLES times."""
    return scores[rng.integers(len(scores), size=(NUM_RESAMPLES, len(scores)))]


def interval(resampled, tasks):
    """The central 95 % of a bootstrap; nothing if a task has a single run, which all resamples would repeat."""
    return np.quantile(resampled, [0.025, 0.975]) if all(len(scores) > 1 for scores in tasks) else (np.nan, np.nan)


def iqm_interval(tasks):
    """IQM over all runs of all tasks, and its 95 % interval by the stratified bootstrap: tasks are fixed, runs are drawn within
    each (Agarwal et al. 2021). `tasks` has an array of scores for each task."""
    rng = np.random.default_rng(0)
    resampled = iqm(np.concatenate([resample(scores, rng) for scores in tasks], axis=1))
    return iqm(np.concatenate(tasks)), *interval(resampled, tasks)


def improvement_interval(pairs):
    """Probability that a run of X beats a run of Y on a task drawn at random, ties counting half, and its 95 % interval."""
    rng = np.random.default_rng(0)

    def wins(x, y):
        x, y = x[..., :, None], y[..., None, :]
        return ((x > y) + 0.5 * (x == y)).mean((-2, -1))

    resampled = np.mean([wins(resample(x, rng), resample(y, rng)) for x, y in pairs], axis=0)
    return np.mean([wins(x, y) for x, y in pairs]), *interval(resampled, itertools.chain(*pairs))


def normalise(env_id, scores):
    """0 is a random player, 1 is a human; None where these are not known."""
    game = env_id.removeprefix("ALE/").removesuffix("-v4").removesuffix("-v5").removesuffix("NoFrameskip")
    if game not in HUMAN:
        return None
    random, human = HUMAN[game]
    return (scores - random) / (human - random)


def common_end(runs):
    """The step that all runs of a task have reached: they are compared up to there."""
    shortest, longest = min(runs, key=lambda run: run.end), max(runs, key=lambda run: run.end)
    if shortest.end < 0.95 * longest.end:
        note(f"{shortest.args['env_id']} is compared up to step {shortest.end:,.0f}, where {shortest.folder} ends")
    return shortest.end


def score_interval(run):
    """The paper's interval between two averaged scores, in steps."""
    return run.args["score_interval"] * run.args["num_envs"] * run.args["num_steps"]


def averaged(run, tag):
    """A curve as the paper draws it: its mean over each interval, as the averaged score is already, put at the last step of it.

    The last interval counts only if the run has completed it, unless it is the only one."""
    steps, values = run.curves[tag]
    intervals = np.ceil(steps / score_interval(run))
    whole = intervals * score_interval(run) <= run.end
    if whole.any():
        steps, values, intervals = steps[whole], values[whole], intervals[whole]
    starts = np.flatnonzero(np.diff(intervals, prepend=-1))
    counts = np.diff(starts, append=len(steps))
    return steps[starts + counts - 1], np.add.reduceat(values, starts) / counts


def final_value(run, tag, end, share):
    """Mean of what was logged in the last share of the steps up to `end`; if nothing there, the last before it; if nothing, nan."""
    steps, values = run.curves.get(tag, np.empty((2, 0)))
    values, steps = values[steps <= end], steps[steps <= end]
    last = values[steps > (1 - share) * end]
    return (last if len(last) else values[-1:]).mean() if len(values) else np.nan


def final_scores(runs, end, share, methods):
    """{method: array of its runs' final scores} on one task."""
    scores = {method: np.array([final_value(run, SCORE, end, share) for run in runs if run.method == method]) for method in methods}
    scores = {method: values[~np.isnan(values)] for method, values in scores.items()}  # who has no score yet at `end`
    return {method: values for method, values in scores.items() if len(values)}


def single_runs(tasks, ends, share, methods):
    """A table of the runs one by one: final score, and how well the return model describes its targets then."""
    rows = []
    for env_id, runs in tasks.items():
        for run in sorted(runs, key=lambda run: (methods.index(run.method), run.args["seed"])):
            values = [final_value(run, tag, ends[env_id], share) for tag in FINAL.values()]
            rows.append((short(env_id), run.method, run.args["seed"], *values))
    return ("task", "method", "seed", *FINAL), rows


# --- pictures ---


def panels(number, columns, width=3.1, height=2.9, margin=0.6):
    """Axes of the given size in inches, in rows, with a margin to their left."""
    rows = -(-number // columns)
    columns = -(-number // rows)  # six panels in two rows of three, not in one of four and one of two
    size = (margin + max(width * columns, 5), 0.8 + height * rows)  # the legend needs some width
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[number:]:
        axis.remove()
    return figure, axes.flat[:number]


def save(figure, path, header, rows):
    """The picture as PNG and SVG, and its numbers as CSV."""
    figure.savefig(path.with_name(f"{path.name}.png"), dpi=200)
    figure.savefig(path.with_name(f"{path.name}.svg"), metadata={"Date": None})  # the same runs give the same file
    plt.close(figure)
    with open(path.with_name(f"{path.name}.csv"), "w", newline="") as file:
        csv.writer(file).writerows([header, *(["" if cell != cell else cell for cell in row] for row in rows)])
    print(f"wrote {path}.png, .svg and .csv")


def draw_curves(tasks, ends, methods, tag, path):
    """Mean and standard deviation over runs."""
    figure, axes = panels(len(tasks), columns=4)
    rows = []
    for axis, (env_id, runs) in zip(axes, tasks.items(), strict=True):
        end = ends[env_id]
        unit, name = (1e6, "millions") if end >= 1e6 else (1e3, "thousands")
        for index, method in enumerate(methods):
            curves = [averaged(run, tag) for run in runs if run.method == method and tag in run.curves]
            curves = [(steps, values) for steps, values in curves if steps[0] <= end]
            if not curves:
                continue
            steps = np.linspace(max(steps[0] for steps, _ in curves), end, 200)
            values = np.array([np.interp(steps, *curve) for curve in curves])
            mean, std = values.mean(0), spread(values)
            colour = COLOURS[index % len(COLOURS)]
            axis.plot(steps / unit, mean, LINES[index % len(LINES)], color=colour, lw=2, label=method)
            axis.fill_between(steps / unit, mean - std, mean + std, color=colour, alpha=0.2, lw=0)
            rows += [(env_id, method, len(values), *row) for row in zip(steps, mean, std, strict=True)]
        axis.set(title=short(env_id), xlabel=f"agent steps ({name})")
    for axis in axes:
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(AXES.get(tag, tag.split("/")[-1].replace("_", " ")))
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    labels = [method for method in methods if method in handles]  # a task may lack some
    for columns in range(min(4, len(labels)), 0, -1):  # as many as fit
        legend = figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=columns)
        if legend.get_window_extent().width < figure.bbox.width or columns == 1:
            break
        legend.remove()
    save(figure, path, ("task", "method", "runs", "step", "mean", "std"), rows)


def draw_intervals(boxes, labels, path, xlabel, header, width=3.1, xlim=None, colours=COLOURS):
    """Points with 95 % intervals, a row for each label; boxes: {title: {label: (..., point, low, high)}}. Returns the table."""
    names = [textwrap.fill(label, 36) for label in labels]
    lines = "\n".join(names).split("\n")
    figure, axes = panels(len(boxes), 4, width, height=0.9 + 0.35 * len(lines), margin=0.1 * max(map(len, lines)))
    for axis, (title, box) in zip(axes, boxes.items(), strict=True):
        for label, (*_, point, low, high) in box.items():
            y, colour = labels.index(label), colours[labels.index(label) % len(colours)]
            axis.plot([low, high], [y, y], color=colour, lw=7, alpha=0.4, solid_capstyle="butt")
            axis.plot(point, y, "o", color=colour)
        axis.set_yticks(range(len(labels)), names if axis.get_subplotspec().is_first_col() else [""] * len(labels))
        axis.set(title=title, xlim=xlim, ylim=(len(labels) - 0.5, -0.5))
        axis.locator_params(axis="x", nbins=4)
        axis.grid(axis="x", alpha=0.4)
    figure.supxlabel(xlabel)
    rows = [(title, label, *numbers) for title, box in boxes.items() for label, numbers in box.items()]
    save(figure, path, header, rows)
    return header, rows


def draw_scores(scores, ends, methods, path):
    """Final scores of each task, and over all games in units of a human player's."""
    boxes = {}
    for env_id, by_method in scores.items():
        boxes[short(env_id)] = {
            method: (f"{ends[env_id]:.0f}", len(values), values.mean(), spread(values), *iqm_interval([values]))
            for method, values in by_method.items()
        }
    if all(normalise(env_id, 0) is not None for env_id in scores):
        for method in methods:
            normalised = [normalise(env_id, by_method[method]) for env_id, by_method in scores.items() if method in by_method]
            if len(normalised) < len(scores):
                note(f"{method} is not in the picture of all games: it has not played all of them")
                continue
            together = np.concatenate(normalised)
            numbers = ("", len(together), together.mean(), spread(together), *iqm_interval(normalised))
            boxes.setdefault("all games (human = 1)", {})[method] = numbers
    header = ("task", "method", "up to step", "runs", "mean", "std", "IQM", "95 % from", "to")
    return draw_intervals(boxes, methods, path, "final score (rewards): IQM and 95 % interval", header)


def draw_improvement(scores, methods, path):
    """How likely a run of one method beats a run of another."""
    box = {}
    for x, y in itertools.combinations(methods, 2):
        pairs = [(by_method[x], by_method[y]) for by_method in scores.values() if x in by_method and y in by_method]
        if pairs:
            box[f"{x} > {y}"] = (len(pairs), *improvement_interval(pairs))
    header = ("task", "comparison", "tasks", "probability", "95 % from", "to")
    xlabel = "probability of improvement and 95 % interval"
    title = "tasks that both methods have"
    return draw_intervals({title: box}, list(box), path, xlabel, header, width=6, xlim=(-0.02, 1.02), colours=["black"])


def draw_maps(tasks, steps, path):
    """The ablation: score of the interval that starts at the given steps, for each k and ū, with the best η of each."""
    figure, axes = panels(len(tasks) * len(steps), len(steps), width=4.2, height=3.4)
    rows = []
    for axis, ((env_id, runs), step) in zip(axes, itertools.product(tasks.items(), steps), strict=True):
        cells = defaultdict(lambda: defaultdict(list))
        for run in runs:
            if "u_bar" in run.args:
                cells[run.args["bootstrap_length"] or run.args["num_steps"], run.args["u_bar"]][run.args["eta"]].append(run)
        if not cells:
            fail(f"--maps-at needs runs with k and ū, and those of {env_id} have none.")
        ks, caps = (sorted(set(values)) for values in zip(*cells, strict=True))
        grid = np.full((len(caps), len(ks)), np.nan)
        for (k, cap), by_eta in sorted(cells.items()):
            # The paper: the best η "according to average long-term performance", here the mean over the second half of the steps.
            long_term = {eta: np.mean([final_value(run, SCORE, run.end, 0.5) for run in by_eta[eta]]) for eta in by_eta}
            eta = max(long_term, key=long_term.get)
            scores = [score for run in by_eta[eta] if (score := score_from(run, step)) is not None]
            if len(scores) < len(by_eta[eta]):
                note(f"{short(env_id)}, k = {k}, ū = {cap}, η = {eta}: {len(by_eta[eta]) - len(scores)} run(s) end before {step:,}")
            if scores:
                grid[caps.index(cap), ks.index(k)] = np.mean(scores)
            rows.append((env_id, step, k, cap, eta, len(scores), np.mean(scores) if scores else ""))
        if np.isnan(grid).all():
            fail(f"no run of {env_id} has a score from step {step:,} on; choose other steps for --maps-at.")
        image = axis.imshow(grid, cmap="cividis", origin="lower", aspect="auto")
        figure.colorbar(image, ax=axis, label="averaged score")
        for y, x in np.argwhere(~np.isnan(grid)):
            dark = grid[y, x] < (np.nanmin(grid) + np.nanmax(grid)) / 2
            axis.text(x, y, f"{grid[y, x]:.3g}", ha="center", va="center", size=10, color="white" if dark else "black")
        axis.set_xticks(range(len(ks)), [f"{k:g}" for k in ks])
        axis.set_yticks(range(len(caps)), ["∞" if np.isinf(cap) else f"{cap:g}" for cap in caps])
        axis.set(title=f"{short(env_id)}, {step / 1e6:g}M steps", xlabel="bootstrap length k (steps)", ylabel="cap ū (nats)")
    header = ("task", "from step", "k", "ū", "best η", "runs", "averaged score")
    save(figure, path, header, rows)
    return header, rows


def score_from(run, step):
    """The averaged score of the first interval that starts at `step` or later, or None."""
    steps, scores = run.curves[SCORE]
    later = scores[steps - score_interval(run) >= step]
    return later[0] if len(later) else None


def short(env_id):
    return env_id.replace("NoFrameskip-v4", "")


def markdown(header, rows):
    def text(cell):
        if cell != cell:
            return ""
        return str(cell) if not isinstance(cell, float) else f"{cell:,.0f}" if 1000 <= abs(cell) < np.inf else f"{cell:.3g}"

    return table(header, [[text(cell) for cell in row] for row in rows])


def made_with(runs):
    """How many runs, of what seeds, commits and versions, and how long they took as far as they have logged their speed."""
    seeds = sorted({run.args["seed"] for run in runs})
    commits = dict.fromkeys(str(run.record.get("git"))[:7] for run in runs)
    versions = dict.fromkeys(" ".join(item) for run in runs for item in run.record.get("versions", {}).items())
    hours = [run.end / run.curves[SPEED][1, -1] / 3600 for run in runs if SPEED in run.curves]
    parts = [f"{len(runs)} runs, seeds {', '.join(map(str, seeds))}", f"commits {', '.join(commits)}", ", ".join(versions)]
    parts.append(f"{np.mean(hours):.2g} hours a run, mean of {len(hours)}" if hours else "")
    return "; ".join(filter(None, parts)) + "."


def main(args):
    if not 0 < args.final <= 1:
        fail(f"--final must lie in (0, 1], not {args.final}.")
    if not args.folders:
        fail("give the folder of the runs.")
    if not args.output.name:
        fail(f"--output {args.output} is a folder; add the beginning of the files' names, such as {args.output / 'figure'}.")
    for folder in args.folders:
        if not folder.is_dir():
            fail(f"there is no folder {folder}.")
    runs = read_runs(args.folders)
    for tag in args.tags:
        known = sorted({known for run in runs for known in run.curves})
        if tag not in known:
            fail(f"no run has logged {tag}; did you mean {difflib.get_close_matches(tag, known, n=1, cutoff=0)[0]}?")
    if args.keep is not None:
        for run in runs:
            keep(run, (*FINAL.values(), SPEED, *args.tags), args.keep)
    methods = name_methods(runs)
    if len(methods) > MOST_METHODS and not args.maps_at:
        hint = "give folders with fewer of them, or --maps-at STEPS for maps over k and ū"
        fail(f"{len(methods)} methods are more than a picture can show; {hint}.")
    tasks = {
        env_id: [run for run in runs if run.args["env_id"] == env_id] for env_id in sorted({run.args["env_id"] for run in runs})
    }
    ends = {env_id: common_end(tasks[env_id]) for env_id in tasks}
    make_folder(args.output.parent)
    plt.rcParams.update({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "fixed"})
    plt.rcParams.update({"axes.titlesize": "medium", "figure.labelsize": "medium"})  # long names of tasks fit

    def path(what):
        return args.output.with_name(f"{args.output.name}_{what}")

    if args.maps_at:
        tables = [draw_maps(tasks, args.maps_at, path("ablation"))]
    else:
        for tag in args.tags:
            draw_curves(tasks, ends, methods, tag, path(tag.split("/")[-1]))
        scores = {env_id: final_scores(tasks[env_id], ends[env_id], args.final, methods) for env_id in tasks}
        tables = [draw_scores(scores, ends, methods, path("scores"))]
        if any(len(by_method) > 1 for by_method in scores.values()):
            tables.append(draw_improvement(scores, methods, path("improvement")))
        tables.append(single_runs(tasks, ends, args.final, methods))
    text = "\n".join(markdown(header, rows) for header, rows in tables) + f"\n{made_with(runs)}\n"
    path("table.md").write_text(text)
    print(f"wrote {path('table.md')}:\n\n{text}")


if __name__ == "__main__":
    start(main, Args, __doc__)
