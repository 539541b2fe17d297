"""Plays a saved agent, with everything it has learnt frozen, and shows what it believes about its returns.

    python evaluate.py runs/NAME --episodes 30              # scores: printed, and written to runs/NAME/evaluation.json
    python evaluate.py --deterministic                      # the newest run; the most likely actions, not sampled ones
    python evaluate.py runs/NAME --episodes 1 --video       # evaluation.mp4: one game, with the agent's beliefs
    python evaluate.py runs/NAME --episodes 30 --report     # evaluation.png: is the return distribution calibrated?

What the numbers and pictures mean: docs/bdpg.md.
"""

import importlib
import json
import math
import os
import platform
import re
import shlex
import signal
import sys
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends quietly

import imageio_ffmpeg
import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from torch.distributions import kl_divergence
from tqdm import tqdm

NUM_SAMPLES = 256  # return samples that stand for the distribution of one state
UNDETERMINED = 0.25  # a return is not known where an estimate makes up more than this share of it (a weight γ^n)
MAX_REPORT_STEPS = 50_000  # recorded for the report; embeddings of many long games would fill the memory
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"  # Okabe and Ito's, for the colour-blind too
plt.switch_backend("Agg")
plt.rcParams |= {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}


@dataclass
class Args:
    path: tyro.conf.Positional[Path] = Path("runs")
    """a checkpoint, a run's folder (its newest checkpoint is taken), or a folder of runs (the newest one is taken)"""
    episodes: int = 30
    """whole episodes (Atari: whole games) to score"""
    deterministic: bool = False
    """take the mode of the policy instead of a sample"""
    seed: int = 1_000_000
    """seed of environments and sampling, far from those of training"""
    max_steps: int = 30_000
    """agent steps after which an episode is cut, so that one that never ends does; Atari's rules allow 27,000"""
    env_id: Optional[str] = None
    """the task that the checkpoint names; needed only for "module:Name-v0", which imports that module"""
    output: Optional[Path] = None
    """the JSON file (default: evaluation.json in the run's folder); video and report go beside it as .mp4 and .png"""
    video: bool = False
    """also film one episode with the agent's beliefs beside it"""
    video_steps: int = 600
    """the longest video, in agent steps"""
    report: bool = False
    """also draw how well the return distribution describes the returns that came true"""


def fail(message):
    """One sentence on stderr and exit code 2: a user who is wrong never sees a traceback."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def replacing(path):
    """A temporary file that takes the place of `path` once it is complete, and is gone if it never is."""
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        fail(f"{path} cannot be written ({error.strerror or 'is the disk full?'}).")
    finally:
        with suppress(OSError):
            temporary.unlink()


# --- the saved agent ---
def load(path, env_id=None):
    """The checkpoint, its path, and the script (as a module) that made it. The file is not trusted: its script must be
    one of ours, which verifies it, and a module that its task would import must be named by the user as well."""
    if path.is_dir():
        newest_run = max(path.glob("*/checkpoint-*.pt"), key=lambda file: file.stat().st_mtime, default=None)
        path = max(path.glob("checkpoint-*.pt"), default=newest_run) or path / "checkpoint-*.pt"
    if not path.is_file():
        fail(f"there is no checkpoint {path}.")
    try:
        name = dict(torch.load(path, map_location="cpu", weights_only=True))["script"]
    except Exception as error:  # a damaged file can fail in many ways, all of which mean the same
        fail(f"{path} is not a readable checkpoint ({type(error).__name__}).")
    ours = isinstance(name, str) and re.fullmatch(r"(ppo|ppo_qr|ppo_wgan|bdpg)_(atari|mujoco)\.py", name)
    if not ours or not Path(__file__).with_name(name).is_file():
        fail(f"{path} was made by {name!r:.80}, which is not one of the training scripts beside evaluate.py.")
    script = importlib.import_module(Path(name).stem)
    checkpoint = script.load_checkpoint(path)
    task = str(checkpoint["args"].env_id)
    if env_id not in (None, task):
        fail(f"{path} is of an agent for {task!r}, not for {env_id!r}.")
    if ":" in task and env_id is None:
        module = task.split(":")[0]
        fail(f"{path} would import the module {module!r}; if you trust that module, add --env-id {shlex.quote(task)}.")
    return checkpoint, path, script


def rebuild(script, checkpoint, path, num_envs, seed=0):
    """The agent as it was saved, the arguments it was trained with, environments to play in, and the agent's age."""
    try:  # hand-edited contents can be wrong in many ways
        args = checkpoint["args"]
        for name, default in vars(script.Args()).items():
            if default is not None:
                setattr(args, name, type(default)(getattr(args, name)))
        args.cuda = args.bf16 = False
        args.bootstrap_length = int(args.bootstrap_length or args.num_steps)
        script.check_args(args)
        args.num_envs = num_envs
        envs = script.Environments(args, seed)
        agent = script.Agent(envs, args)
        agent.load_state_dict(checkpoint["agent"])
        return agent.requires_grad_(False), args, envs, int(checkpoint["global_step"])
    except Exception as error:
        fail(f"{path} does not fit {script.__name__}.py ({error!r:.200}).")


# --- playing ---
def play(agent, envs, quotas, deterministic=False, max_steps=10**9, keep=0, camera=None, num_pictures=0, progress=None):
    """Plays until environment i has completed quotas[i] episodes, a number fixed beforehand: the first ones to end, of
    all environments together, would be too short on average. An environment whose episode is cut at `max_steps` plays
    no more, as it cannot be reset alone. Returns the episodes and the record of the first `keep` steps."""
    torch.manual_seed(envs.seed)
    episodes, quotas = [[] for _ in quotas], list(quotas)
    scores, lengths = np.zeros(len(quotas)), np.zeros(len(quotas), dtype=int)
    embeddings, steps, cut_short, pictures = [], [], [], []
    obs, t = agent.observe(envs.reset()), 0
    while any(counts := [len(done) < quota for done, quota in zip(episodes, quotas, strict=True)]):
        c = agent.trunk(obs)
        policy = agent.policy(obs, c)
        action = (policy.mode if deterministic else policy.sample()).numpy()
        if t < num_pictures:
            pictures.append(camera(action))
        raw_obs, reward, terminated, truncated, last_obs, ended = envs.step(action)
        obs = agent.observe(raw_obs)
        if t <= keep:
            embeddings.append(c)
        if t < keep:
            steps.append([torch.tensor(values) for values in (reward, terminated, terminated | truncated, counts)])
            cut_short += [(t, i, last_obs[i]) for i in np.flatnonzero(truncated & ~terminated)]
        scores += reward
        lengths += 1
        for i in np.flatnonzero(ended | (lengths >= max_steps)):
            if counts[i]:
                episode = {"score": float(scores[i]), "length": int(lengths[i]), "seed": envs.seed + int(i)}
                episodes[i].append(episode | {"cut": not ended[i]})
                quotas[i] = quotas[i] if ended[i] else 0
                if progress is not None:
                    progress.update()
            scores[i] = lengths[i] = 0
        t += 1
    record = SimpleNamespace(cut_short=cut_short, pictures=pictures)
    if keep:  # one embedding more than steps: that of the last step's next state
        record.embeddings = torch.stack(embeddings if t > keep else [*embeddings, agent.trunk(obs)])
        columns = map(torch.stack, zip(*steps, strict=True))
        record.rewards, record.terminations, record.dones, record.counts = columns
    return [episode for done in episodes for episode in done], record


def summarise(scores):
    rng = np.random.default_rng(0)
    low, high = np.quantile([rng.choice(scores, len(scores)).mean() for _ in range(10_000)], [0.025, 0.975])
    summary = {"mean": float(np.mean(scores)), "std": float(np.std(scores)), "median": float(np.median(scores))}
    return summary | {"mean_95": [float(low), float(high)]}


# --- beliefs and what came true ---
def sample_returns(agent, c, num_samples):
    """Samples of the return (num_samples, *states); of plain PPO, which has no distribution, its one value."""
    return agent.value(c).squeeze(-1)[None] if hasattr(agent, "value") else agent.return_model.sample(c, num_samples)


def look_back(script, agent, args, record):
    """What became of each recorded step, in the scale of training: Bellman target x, return to the end of its learning
    episode, information gain u (None without an encoder). Where an episode was cut, or the record ends, a sampled
    return stands for what would have followed; the return is known if that has little weight."""
    c = record.embeddings[:-1]
    rewards = (record.rewards / agent.reward_stats.std).clamp(-10, 10).float()
    g = sample_returns(agent, record.embeddings, 1)[0]
    g, next_g = g[:-1], g[1:].clone()
    if record.cut_short:
        steps, indices, last_obs = zip(*record.cut_short, strict=True)
        last_embeddings = agent.trunk(agent.observe(np.stack(last_obs)))
        next_g[steps, indices] = sample_returns(agent, last_embeddings, 1)[0]
    ends = (record.terminations, record.dones, args.gamma)
    window = (args.gae_lambda, args.bootstrap_length)
    x_lambda = script.k_step_gae(rewards, g, next_g, *ends, *window) + g
    x = script.sr_targets(rewards, next_g, *ends, *window) if args.target == "sr" else x_lambda
    to_the_end = (
        1.0,
        len(g),
    )  # the return is the target with λ = 1 and no limit on k, and so is the sample's weight γ^n
    returns = script.k_step_gae(rewards, g, next_g, *ends, *to_the_end) + g
    sampled, nothing = record.dones | (torch.arange(len(g)) == len(g) - 1).unsqueeze(1), torch.zeros_like(g)
    weights = script.k_step_gae(nothing, nothing, sampled.float(), *ends, *to_the_end)
    u = None
    if hasattr(args, "u_bar"):  # BDPG
        model, b = agent.return_model, agent.return_model.centre(c)
        u = kl_divergence(model.encode(x_lambda, b, c), model.encode(g, b, c)).sum(-1).clamp(max=args.u_bar)
    return SimpleNamespace(x=x, returns=returns, known=weights <= UNDETERMINED, u=u)


def probability_integral(samples, truth):
    """Where each truth (states,) falls among its samples (n, states), in (0, 1): uniform if both have the same
    distribution. Ties and the gaps between samples are filled at random, which makes it exact for any n."""
    below, equal = (samples < truth).sum(0), (samples == truth).sum(0)
    return (below + torch.rand(truth.shape) * (equal + 1)) / (len(samples) + 1)


def coverage(pit, levels):
    """The share of truths inside the central interval of each nominal level."""
    return ((2 * pit - 1).abs().unsqueeze(-1) <= levels).float().mean(0)


def distribution_metrics(samples, truth, pit):
    """How well sampled returns (n, states) describe what came true (states,), one value per state."""
    mean = samples.mean(0)
    # Each state has a single truth, so W1 compares what all states share: the distribution around the model's mean.
    residuals, levels = truth - mean, (torch.arange(100) + 0.5) / 100
    w1 = (residuals.quantile(levels) - (samples - mean).flatten().quantile(levels)).abs().mean()
    metrics = {
        "coverage_80": coverage(pit, torch.tensor([0.8])),
        "explained_variance": 1 - residuals.var() / truth.var(),
        "w1": w1 / truth.std(),
        "spread": samples.std(0).mean() / truth.std(),
    }
    return {name: value.item() if value.isfinite() else None for name, value in metrics.items()}


# --- pictures ---
def make_camera(script, args, seed):
    """One environment to film, a function that returns its picture and is told each action, and frames per second."""
    args = replace(args, num_envs=1)
    if script.__name__.endswith("_atari"):
        # The agent sees 84x84 grey pixels. The same game in full is a second one, with the same seed and actions.
        full = script.Environments(args, seed, grayscale=False, img_height=210, img_width=160, stack_num=1)
        pictures = [full.reset()[0, 0]]

        def camera(action):
            pictures.append(full.step(action)[0][0, 0])
            return pictures.pop(0)

        return script.Environments(args, seed), camera, 15
    warnings.simplefilter("ignore")  # GLFW's, which repeat what the error says
    envs = script.Environments(args, seed, render_mode="rgb_array")
    try:
        envs.reset()
        env = envs.envs.envs[0].unwrapped
        if hasattr(env, "mujoco_renderer"):  # its camera stays where it is, and the agent runs out of the picture
            import mujoco

            env.mujoco_renderer.camera_id = mujoco.mj_name2id(env.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        if env.render() is None:
            fail(f"{args.env_id} has no pictures to film.")
    except Exception as error:  # without OpenGL each backend fails in its own way
        message = f"{args.env_id} cannot be drawn here ({error!r:.200})"
        fail(f"{message}; MuJoCo's tasks need OpenGL: try MUJOCO_GL=egl, osmesa or glfw.")
    return envs, lambda action: env.render(), min(30, env.metadata.get("render_fps", 30))


def film(script, agent, args, options, path, envs, camera, fps):
    """Plays one episode, then draws it: only afterwards is it known what came true."""
    # The game goes on unseen for as long as its rewards still matter to the last picture.
    extra = min(2000, math.ceil(math.log(0.01) / math.log(args.gamma))) if 0 < args.gamma < 1 else 2000
    num_steps = options.video_steps + extra
    _, record = play(agent, envs, [1], options.deterministic, num_steps, num_steps, camera, options.video_steps)
    truth = look_back(script, agent, args, record)
    T = len(record.pictures)
    samples = sample_returns(agent, record.embeddings[:T, 0], NUM_SAMPLES).numpy()
    low, median, high = np.quantile(samples, [0.05, 0.5, 0.95], axis=0)
    x, u = truth.x[:T, 0].numpy(), None if truth.u is None else truth.u[:T, 0].numpy()
    returns = np.where(truth.known[:T, 0], truth.returns[:T, 0], np.nan)
    score, steps = record.rewards[:T, 0].cumsum(0).numpy(), np.arange(T)
    finite = np.concatenate([np.quantile(samples, [0.0005, 0.9995]), x, returns[~np.isnan(returns)]])
    margin = 0.05 * (finite.max() - finite.min()) + 1e-6
    limits = (finite.min() - margin, finite.max() + margin)
    grid = np.linspace(*limits, 300)

    figure = plt.figure(figsize=(12.8, 7.2), dpi=100, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.35))
    game = left.subplots()
    game.axis("off")
    image, title = game.imshow(record.pictures[0]), game.set_title(" ", fontsize=15)
    known_spread = len(samples) > 1  # plain PPO has a value and no distribution
    axes = right.subplots(1 + known_spread + (u is not None), 1, squeeze=False).flatten()
    along, gain = axes[int(known_spread)], axes[-1]
    along.set(xlim=(0, max(T - 1, 1)), ylim=limits, ylabel="return")
    band = along.fill_between([0], [0], [0], color=BLUE, alpha=0.3, lw=0, label="5–95 % of p(X|s)" * known_spread)
    curves = {along.plot([], color=BLUE, lw=2, label="median" if known_spread else "value V(s)")[0]: median}
    curves |= {along.plot([], color=ORANGE, lw=2, label="came true")[0]: returns}
    beliefs = []
    if known_spread:
        density = axes[0]
        density.set(xlim=limits, xlabel="discounted return from here (scaled rewards)")
        density.set(ylim=(0, 1.08), ylabel="relative density")
        beliefs += density.fill([0] * 3, [0] * 3, color=BLUE, alpha=0.45, label="sampled returns p(X|s)")
        beliefs += [density.axvline(0, color=ORANGE, lw=3, label="return that came true")]
        beliefs += [density.axvline(0, color="black", lw=2, ls=(0, (2, 1.5)), label="Bellman target x")]
    for axis in axes[: 1 + known_spread]:
        legend = dict(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, frameon=False)
        axis.legend(**legend, fontsize=11, handlelength=1.4, columnspacing=1.3)
    if u is not None:
        gain.set(xlim=(0, max(T - 1, 1)), ylabel="information\ngain (nats)")
        scale_gain(gain, u.max())
        curves |= {gain.plot([], color=GREEN, lw=1.5)[0]: u}
    axes[-1].set_xlabel("step of the episode")
    figure.align_ylabels(axes)
    moving = [image, title, band, *curves, *beliefs]  # drawn anew in each frame, upon all else: four times as fast
    for artist in moving:
        artist.set_animated(True)
    figure.canvas.draw()
    background = figure.canvas.copy_from_bbox(figure.bbox)

    with replacing(path) as temporary:
        encoder = imageio_ffmpeg.write_frames(temporary, (1280, 720), fps=fps, quality=7, ffmpeg_log_level="quiet")
        encoder.send(None)
        for t in tqdm(steps, desc="video", disable=not sys.stderr.isatty()):
            image.set_data(record.pictures[t])
            title.set_text(f"{args.env_id}   step {t}   score {score[t]:,.0f}")
            band.set_data(steps[: t + 1], low[: t + 1], high[: t + 1])
            for curve, values in curves.items():
                curve.set_data(steps[: t + 1], values[: t + 1])
            if known_spread:
                shape, came, target = beliefs
                width = max(1.06 * samples[:, t].std() * NUM_SAMPLES**-0.2, grid[1] - grid[0])
                height = np.exp(-0.5 * ((grid[:, None] - samples[:, t]) / width) ** 2).sum(1)
                shape.set_xy(np.column_stack([np.r_[limits[0], grid, limits[1]], np.r_[0, height / height.max(), 0]]))
                came.set_xdata([returns[t]] * 2)
                target.set_xdata([x[t]] * 2)
            figure.canvas.restore_region(background)
            for artist in moving:
                artist.axes.draw_artist(artist)
            encoder.send(np.asarray(figure.canvas.buffer_rgba())[..., :3].tobytes())
        encoder.close()
        num_frames = 0
        with suppress(RuntimeError):  # on a full disk the encoder ends in silence
            num_frames, _ = imageio_ffmpeg.count_frames_and_secs(temporary)
        if num_frames < T:
            raise OSError
    plt.close(figure)


def draw_report(script, agent, args, record, path, title):
    """Four panels on the steps whose return is known. Returns the numbers behind them."""
    truth = look_back(script, agent, args, record)
    usable = record.counts & truth.known
    if not usable.any():
        fail("--report needs returns that came true, but every episode was cut too early (see docs/bdpg.md).")
    some = torch.randperm(int(usable.sum()))[:5000]
    c, returns, x = (values[usable][some] for values in (record.embeddings[:-1], truth.returns, truth.x))
    samples = torch.cat([agent.return_model.sample(part, NUM_SAMPLES) for part in c.split(250)], 1)
    pit, pit_x = probability_integral(samples, returns), probability_integral(samples, x)
    stds, error = samples.std(0).numpy(), (samples.mean(0) - returns).square().mean().sqrt().item()
    episodes = int((record.dones & record.counts).sum())
    numbers = {"states": len(returns), "learning_episodes": episodes}
    numbers["true_returns"] = distribution_metrics(samples, returns, pit)
    numbers["targets"] = distribution_metrics(samples, x, pit_x)

    figure, axes = plt.subplots(2, 2, figsize=(11, 9), dpi=120, layout="constrained")
    figure.suptitle(f"{title}\n{len(returns):,} states of {episodes:,} learning episodes", fontsize=14)
    calibration, histogram, sharpness, gain = axes.flat
    calibration.plot([0, 100], [0, 100], color=GREY, ls="--", label="ideal")
    for truths, color, style, name in ((pit, ORANGE, "-", "return"), (pit_x, "black", ":", "target x")):
        covered = 100 * coverage(truths, torch.linspace(0, 1, 101))
        calibration.plot(range(101), covered, color=color, ls=style, lw=2.5, label=f"{name}: {covered[80]:.0f} %")
    calibration.set(xlabel="central interval of the samples (%)", ylabel="came true inside it (%)")
    calibration.set(xlim=(0, 100), ylim=(0, 100), title="Calibration")
    calibration.legend(frameon=False, loc="upper left", title="inside 80 %", alignment="left")
    histogram.hist(pit.numpy(), bins=20, range=(0, 1), density=True, color=BLUE, alpha=0.6)
    histogram.axhline(1, color=GREY, ls="--", label="ideal")
    histogram.set(title="Where returns fall", xlabel="quantile of the true return (PIT)", ylabel="density", xlim=(0, 1))
    histogram.legend(frameon=False, loc="upper center")
    bins = np.linspace(0, 1.05 * max(stds.max(), error), 60)
    sharpness.hist(stds, bins=bins, color=BLUE, alpha=0.6, label="predicted std")
    sharpness.axvline(error, ymax=0.74, color=ORANGE, lw=3, label="rms error of the mean")
    sharpness.set(xlabel="std of the return (scaled rewards)", ylabel="states", title="Sharpness")
    sharpness.set(xlim=(0, None), ylim=(0, 1.35 * sharpness.get_ylim()[1]))  # room for the legend
    sharpness.locator_params(axis="x", nbins=5)  # more numbers would run into each other
    sharpness.legend(frameon=False, loc="upper center")
    gain.axis("off") if truth.u is None else draw_gain(gain, truth.u, record)
    with replacing(path) as temporary:
        figure.savefig(temporary)
    plt.close(figure)
    return numbers


def draw_gain(axis, u, record):
    """Information gain against the step of the learning episode: median, middle half and middle 90 % in 40 bins."""
    age = torch.zeros_like(u)
    for t in range(1, len(u)):
        age[t] = (age[t - 1] + 1) * ~record.dones[t - 1]
    age, u = age[record.counts].numpy(), u[record.counts].numpy()
    edges = np.unique(np.linspace(0, np.quantile(age, 0.98) + 1, 41).round())
    bins = [u[(age >= low) & (age < high)] for low, high in zip(edges, edges[1:], strict=False)]
    p05, p25, p50, p75, p95 = np.array([np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95]) for values in bins]).T
    middles = (edges[:-1] + edges[1:] - 1) / 2
    axis.fill_between(middles, p05, p95, color=GREEN, alpha=0.2, lw=0, label="5–95 %")
    axis.fill_between(middles, p25, p75, color=GREEN, alpha=0.4, lw=0, label="25–75 %")
    axis.plot(middles, p50, color=GREEN, lw=2.5, label="median")
    axis.set(xlabel="step of the learning episode", ylabel="information gain (nats)", title="Information gain")
    scale_gain(axis, 5 * p95.max())  # room for the legend
    axis.legend(frameon=False, loc="upper left", ncols=3, columnspacing=1, handlelength=1.2)


def scale_gain(axis, highest):
    """Linear up to 1 nat, logarithmic above: a few surprises are a hundred times the usual."""
    axis.set_yscale("symlog", linthresh=1, linscale=0.7)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylim(0, max(1, 1.4 * highest))


# --- command line ---
@torch.no_grad()
def evaluate(options):
    for name, least in (("episodes", 1), ("video_steps", 1), ("max_steps", 1), ("seed", 0)):
        if not least <= getattr(options, name) < 2**30:
            fail(f"--{name.replace('_', '-')} must lie between {least} and 2**30, not be {getattr(options, name)}.")
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a screen; must be set before MuJoCo is imported
    checkpoint, path, script = load(options.path, options.env_id)
    output = options.output or path.parent / "evaluation.json"
    picture, movie = output.with_suffix(".png"), output.with_suffix(".mp4")
    taken = output.name.lower() == "run.json" or any(file.is_dir() for file in (output, picture, movie))
    if taken or output.suffix != ".json" or not os.access(output.parent, os.W_OK):
        fail(f"{output} cannot be written; --output must name a .json file, but not run.json, in a folder that exists.")
    num_envs = min(options.episodes, 8)
    agent, args, envs, global_step = rebuild(script, checkpoint, path, num_envs, options.seed)
    # What the pictures need is looked for before the long part, not after it.
    if options.report and not hasattr(agent, "return_model"):
        fail(f"--report is about return distributions, and plain PPO ({script.__name__}.py) learns none.")
    if options.video:
        try:
            imageio_ffmpeg.get_ffmpeg_exe()
        except RuntimeError as error:
            fail(f"--video needs ffmpeg ({error}).")
        filmed = make_camera(script, args, options.seed)

    episodes, record = [], None
    with tqdm(total=options.episodes, unit=" episodes", disable=not sys.stderr.isatty()) as progress:
        while left := options.episodes - len(episodes):
            if episodes:  # some were cut, and the rest is played in new environments
                envs = script.Environments(args, envs.seed + num_envs)
            quotas = [left // num_envs + (i < left % num_envs) for i in range(num_envs)]
            keep = MAX_REPORT_STEPS // num_envs if options.report and not episodes else 0
            played, steps = play(agent, envs, quotas, options.deterministic, options.max_steps, keep, progress=progress)
            envs.envs.close()
            episodes, record = episodes + played, record or steps
    scores = [episode["score"] for episode in episodes]
    if not np.abs(scores).max() < 1e100:
        fail(f"{args.env_id} has scores beyond all numbers.")
    result = summarise(scores)
    low, high = result["mean_95"]
    cut = sum(episode["cut"] for episode in episodes)
    script.say(
        f"{args.env_id} after {global_step:,} steps, {len(episodes)} episode{'s' * (len(episodes) > 1)}: "
        f"mean {result['mean']:.1f} (95 % interval {low:.1f} to {high:.1f}), std {result['std']:.1f}, "
        f"median {result['median']:.1f}" + f"; {cut} cut at --max-steps {options.max_steps:,}" * (cut > 0)
    )
    result |= {f"{name}s": [episode[name] for episode in episodes] for name in ("score", "length", "seed")}
    result |= {"max_steps": options.max_steps, "cut_at_max_steps": cut, "deterministic": options.deterministic}
    result |= {"env_id": args.env_id, "script": checkpoint["script"], "checkpoint": str(path)}
    result |= {"global_step": global_step, "command": shlex.join(["python", *sys.argv])}
    packages = ("torch", "numpy", "gymnasium", "envpool", "mujoco", "ale-py")
    versions = {package.name: package.version for package in distributions() if package.name in packages}
    result["versions"] = {"python": platform.python_version(), **versions}
    if options.report:
        title = f"{args.env_id}, {script.__name__} after {global_step:,} steps"
        result["report"] = draw_report(script, agent, args, record, picture, title)
    with replacing(output) as temporary:
        temporary.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    script.say("\n".join([str(output)] + [str(picture)] * options.report))
    if options.video:
        film(script, agent, args, options, movie, *filmed)
        script.say(str(movie))
    return result


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        evaluate(tyro.cli(Args, description=__doc__))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}.")


if __name__ == "__main__":
    main()
