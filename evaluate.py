"""Plays a saved agent, with everything it has learnt frozen, and shows what it believes about its returns.

    python evaluate.py runs/NAME --episodes 30              # scores: printed, and written to runs/NAME/evaluation.json
    python evaluate.py runs/NAME --deterministic            # the most likely actions instead of sampled ones
    python evaluate.py runs/NAME --episodes 1 --video       # evaluation.mp4: one game, and the agent's beliefs beside it
    python evaluate.py runs/NAME --episodes 30 --report     # evaluation.png: is the return distribution calibrated?

What the numbers and pictures mean: docs/evaluate.md.
"""

import importlib
import json
import math
import os
import platform
import re
import shlex
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import gymnasium as gym
import numpy as np
import torch
import tyro
from tqdm import tqdm

NUM_SAMPLES = 256  # return samples that stand for the distribution of one state
UNDETERMINED = 0.25  # a return is not known where an estimate makes up more than this share of it (a weight γ^n)
MAX_REPORT_STEPS = 50_000  # recorded for the report; embeddings of many long games would fill the memory
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"  # of Okabe and Ito, told apart by the colour-blind


@dataclass
class Args:
    path: tyro.conf.Positional[Path]
    """a run's folder (its newest checkpoint is taken) or a checkpoint"""
    episodes: int = 30
    """whole episodes (Atari: whole games) to score"""
    deterministic: bool = False
    """take the mode of the policy instead of a sample"""
    seed: int = 1_000_000
    """seed of environments and sampling, far from those of training"""
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


def first_line(error):
    """In one line what the error says first; PyTorch's first line only announces the second."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


# --- the saved agent ---


def load(path):
    """The checkpoint, its path, and the script (as a module) that made it."""
    if path.is_dir():
        path = max(path.glob("checkpoint-*.pt"), default=path / "checkpoint-*.pt")
    if not path.is_file():
        fail(f"there is no checkpoint {path}.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        name = dict(checkpoint)["script"]
    except Exception as error:  # a damaged file can fail in many ways, all of which mean the same
        fail(f"{path} is not a readable checkpoint ({type(error).__name__}).")
    folder = Path(__file__).resolve().parent
    # A file's name decides which code runs, so only names of training scripts are taken.
    if not (isinstance(name, str) and re.fullmatch(r"\w+_(atari|mujoco)\.py", name) and (folder / name).is_file()):
        fail(f"{path} was made by {name!r}, which is not a training script in {folder}.")
    sys.path.insert(0, str(folder))
    try:
        return checkpoint, path, importlib.import_module(Path(name).stem)
    except ImportError as error:
        fail(f"{name}, which made {path}, cannot be loaded here ({error}); see requirements.txt.")


def rebuild(script, checkpoint, path, num_envs):
    """The agent as it was saved, the arguments it was trained with, and environments to play in."""

    def misfit(error):
        fail(f"{path} does not fit {script.__name__}.py ({type(error).__name__}: {first_line(error)}).")

    try:
        args = script.Args(**checkpoint["args"])
        args.cuda = args.capture_video = False
        script.check_args(args)
        args.num_envs = num_envs
    except Exception as error:  # hand-edited contents, too, can be wrong in many ways
        misfit(error)
    try:
        envs = script.make_envs(args, None)
    except Exception as error:
        fail(f"{args.env_id} cannot be made here ({first_line(error)}).")
    try:
        agent = script.Agent(envs, args)
        agent.load_state_dict(checkpoint["agent"])
        global_step = int(checkpoint["global_step"])
    except Exception as error:
        misfit(error)
    broken = [name for name, parameter in agent.named_parameters() if not parameter.isfinite().all()]
    if broken:
        fail(f"{path} is broken: {broken[0]} is not finite.")
    return agent.requires_grad_(False), args, envs, global_step


# --- playing ---


def play(
    script, agent, envs, seed, quotas, deterministic=False, max_steps=math.inf, keep=0, camera=None, num_pictures=0, progress=None
):
    """Plays until environment i has completed quotas[i] episodes, a number fixed beforehand: the first ones to end, of all
    environments together, would be too short on average. Returns the episodes and the record of the first `keep` steps."""
    torch.manual_seed(seed)
    episodes = [[] for _ in quotas]
    scores, lengths = np.zeros(len(quotas)), np.zeros(len(quotas), dtype=int)
    record = SimpleNamespace(embeddings=[], rewards=[], terminations=[], dones=[], counts=[], cut_short=[], pictures=[])
    obs = agent.observe(script.reset_envs(envs, seed), learn=False)
    t = 0
    while any(len(done) < quota for done, quota in zip(episodes, quotas, strict=True)) and t < max_steps:
        c = agent.trunk(obs)
        if t == keep:
            record.last_embedding = c
        policy = agent.policy(obs, c)
        action = (policy.mode if deterministic else policy.sample()).numpy()
        counts = [len(done) < quota for done, quota in zip(episodes, quotas, strict=True)]
        if camera is not None and t < num_pictures:
            record.pictures.append(camera(action))
        raw_obs, reward, terminated, truncated, final_obs, game_over = script.step_envs(envs, action)
        obs = agent.observe(raw_obs, learn=False)
        if t < keep:
            record.embeddings.append(c)
            record.rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            record.terminations.append(torch.as_tensor(terminated))
            record.dones.append(torch.as_tensor(terminated | truncated))
            record.counts.append(torch.tensor(counts))
            record.cut_short += [(t, i, final_obs[i]) for i in np.flatnonzero(truncated & ~terminated)]
        scores += reward
        lengths += 1
        for i in np.flatnonzero(game_over):
            if counts[i]:
                episodes[i].append({"score": float(scores[i]), "length": int(lengths[i]), "seed": seed + int(i)})
                if progress is not None:
                    progress.update()
            scores[i] = lengths[i] = 0
        t += 1
    if keep:
        if t <= keep:
            record.last_embedding = agent.trunk(obs)
        for name in ("embeddings", "rewards", "terminations", "dones", "counts"):
            setattr(record, name, torch.stack(getattr(record, name)))
    return [episode for done in episodes for episode in done], record


def summarise(scores):
    scores = np.asarray(scores)
    resampled = np.random.default_rng(0).choice(scores, (10_000, len(scores))).mean(1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {
        "mean": float(scores.mean()),
        "std": float(scores.std()),
        "median": float(np.median(scores)),
        "mean_95": [float(low), float(high)],
    }


# --- beliefs and what came true ---


def returns_to_go(rewards, next_g, terminations, dones, gamma):
    """The discounted return from each step to the end of its learning episode, and the weight γ^n of the estimate in it: where an
    episode was cut, or the record ends, a sampled return stands for what would have followed."""
    returns, weights = torch.empty_like(rewards), torch.empty_like(rewards)
    after, weight = next_g[-1], torch.ones_like(rewards[0])
    for t in reversed(range(len(rewards))):
        after = torch.where(dones[t], next_g[t] * ~terminations[t], after)
        weight = torch.where(dones[t], (~terminations[t]).float(), weight)
        after, weight = rewards[t] + gamma * after, gamma * weight
        returns[t], weights[t] = after, weight
    return returns, weights


def look_back(script, agent, args, record):
    """What became of each recorded step, in the scale of training: Bellman target x, return, whether the return is known,
    information gain u (None without an encoder)."""
    model, c = agent.return_model, record.embeddings
    if getattr(args, "clip_reward", False):
        rewards = record.rewards.sign()
    else:
        rewards = (record.rewards / agent.reward_stats.std).clamp(-10, 10).float()
    g = model.sample(torch.cat([c, record.last_embedding.unsqueeze(0)]), 1)[0]
    g, next_g = g[:-1], g[1:].clone()
    if record.cut_short:
        steps, indices, final_obs = zip(*record.cut_short, strict=True)
        next_g[steps, indices] = model.sample(agent.trunk(agent.observe(np.stack(final_obs), learn=False)), 1)[0]
    ends = (record.terminations, record.dones, args.gamma)
    window = (args.gae_lambda, args.bootstrap_length or args.num_steps)
    if args.target == "sr":
        x = script.sr_targets(rewards, next_g, *ends, *window)
    else:
        x = script.k_step_gae(rewards, g, next_g, *ends, *window) + g
    returns, weights = returns_to_go(rewards, next_g, *ends)
    u = None
    if hasattr(script, "gaussian_kl"):
        centre = model.centre(c)
        at_x, at_g = (model.encode(model.relative(value, centre), c) for value in (x, g))
        u = script.gaussian_kl(*at_x, *at_g).clamp(max=args.u_bar)
    return SimpleNamespace(x=x, returns=returns, known=weights <= UNDETERMINED, u=u)


def probability_integral(samples, truth):
    """Where each truth (states,) falls among its samples (n, states), in (0, 1): uniform if both have the same distribution. Ties
    and the gaps between samples are filled at random, which makes it exact for any number of samples."""
    below, equal = (samples < truth).sum(0), (samples == truth).sum(0)
    return (below + torch.rand(truth.shape) * (equal + 1)) / (len(samples) + 1)


def coverage(pit, levels):
    """The share of truths inside the central interval of each nominal level."""
    return ((2 * pit - 1).abs().unsqueeze(-1) <= levels).float().mean(0)


# --- pictures ---


def need_matplotlib():
    try:
        import matplotlib
    except ImportError:
        fail("--video and --report need Matplotlib; install it with: pip install matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    import matplotlib.pyplot as plt

    return plt


def need_encoder():
    try:
        import imageio
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        fail("--video needs an encoder; install it with: pip install imageio imageio-ffmpeg")
    return imageio


def make_camera(script, args, seed):
    """An environment to film, a function that returns its picture and is told each action, and frames per second."""
    same_step = gym.vector.AutoresetMode.SAME_STEP
    if script.__name__.endswith("_atari"):
        # The agent sees 84x84 grey pixels. The same game in full is a second one, with the same seed and the same actions.
        envs, spec = script.make_envs(args, None), gym.spec(args.env_id).kwargs
        same = dict(repeat_action_probability=spec["repeat_action_probability"], autoreset_mode=same_step, life_loss_info=True)
        twin = script.AtariVectorEnv(spec["game"], 1, **same, grayscale=False, img_height=210, img_width=160, stack_num=1)
        pictures = [twin.reset(seed=seed)[0][0, 0]]

        def camera(action):
            pictures.append(twin.step(action)[0][0, 0])
            return pictures.pop(0)

        return envs, camera, 15
    warnings.simplefilter("ignore")  # GLFW's, which repeat what the error says
    try:
        # gymnasium 1.4 leaves MuJoCo's camera where it is unless told to follow, and the agent runs out of the picture
        tracking = {"camera_name": "track"} if "mujoco" in str(gym.spec(args.env_id).entry_point) else {}
        env = gym.make(args.env_id, render_mode="rgb_array", disable_env_checker=True, **tracking)
        envs = gym.vector.SyncVectorEnv([lambda: env], autoreset_mode=same_step)
        envs.video_dir = None  # it is filmed here, not by the script
        envs.reset(seed=seed)
        if env.render() is None:
            fail(f"{args.env_id} has no pictures to film.")
    except Exception as error:  # without OpenGL each backend fails in its own way
        fail(f"{args.env_id} cannot be drawn here ({first_line(error)}); MuJoCo needs OpenGL: try MUJOCO_GL=egl, osmesa or glfw.")
    return envs, lambda action: env.render(), min(30, env.metadata.get("render_fps", 30))


def film(plt, imageio, script, agent, args, options, path, envs, camera, fps):
    """Plays one episode, then draws it: only afterwards is it known what came true."""
    # The game goes on unseen for as long as its rewards still matter to the last picture.
    extra = 2000 if args.gamma == 1 else min(2000, math.ceil(math.log(0.01) / math.log(args.gamma)))
    num_steps = options.video_steps + extra
    _, record = play(
        script, agent, envs, options.seed, [1], options.deterministic, num_steps, num_steps, camera, options.video_steps
    )
    truth = look_back(script, agent, args, record)
    T = min(options.video_steps, len(record.rewards))
    samples = agent.return_model.sample(record.embeddings[:T, 0], NUM_SAMPLES).numpy()
    low, median, high = np.quantile(samples, [0.05, 0.5, 0.95], axis=0)
    x = truth.x[:T, 0].numpy()
    returns = np.where(truth.known[:T, 0], truth.returns[:T, 0], np.nan)
    u = None if truth.u is None else truth.u[:T, 0].numpy()
    score, steps = record.rewards[:T, 0].cumsum(0).numpy(), np.arange(T)

    finite = np.concatenate([np.quantile(samples, [0.0005, 0.9995]), x, returns[~np.isnan(returns)]])
    margin = 0.05 * (finite.max() - finite.min()) + 1e-6
    limits = (finite.min() - margin, finite.max() + margin)
    grid = np.linspace(*limits, 300)

    legend = dict(
        loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, frameon=False, fontsize=11, handlelength=1.4, columnspacing=1.3
    )
    figure = plt.figure(figsize=(12.8, 7.2), dpi=100, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.35))
    game = left.subplots()
    game.axis("off")
    image = game.imshow(record.pictures[0], animated=True)
    title = game.set_title(" ", fontsize=15)  # blank at first, to keep its place; drawn anew below
    title.set_animated(True)
    axes = right.subplots(2 if u is None else 3, 1)
    density, along = axes[0], axes[1]
    density.set(xlim=limits, ylim=(0, 1.08), xlabel="discounted return from here (scaled rewards)", ylabel="relative density")
    (shape,) = density.fill([0, 0, 0], [0, 0, 0], color=BLUE, alpha=0.45, animated=True, label="sampled returns p(X|s)")
    came = density.axvline(0, color=ORANGE, lw=3, animated=True, label="return that came true")
    target = density.axvline(0, color="black", lw=2, ls=(0, (2, 1.5)), animated=True, label="Bellman target x")
    density.legend(**legend)
    along.set(xlim=(0, max(T - 1, 1)), ylim=limits, ylabel="return")
    band = along.fill_between([0], [0], [0], color=BLUE, alpha=0.3, lw=0, animated=True, label="5–95 % of p(X|s)")
    (middle,) = along.plot([], [], color=BLUE, lw=2, animated=True, label="median")
    (truths,) = along.plot([], [], color=ORANGE, lw=2, animated=True, label="came true")
    along.legend(**legend)
    artists = [(game, image), (game, title), (density, shape), (density, came), (density, target)]
    artists += [(along, band), (along, middle), (along, truths)]
    if u is not None:
        axes[2].set(xlim=(0, max(T - 1, 1)), ylabel="information\ngain (nats)")
        scale_gain(axes[2], u.max())
        (gain,) = axes[2].plot([], [], color=GREEN, lw=1.5, animated=True)
        artists.append((axes[2], gain))
    axes[-1].set_xlabel("step of the episode")
    figure.align_ylabels(axes)
    figure.canvas.draw()
    background = figure.canvas.copy_from_bbox(figure.bbox)

    temporary = path.with_suffix(".tmp.mp4")
    with imageio.get_writer(temporary, fps=fps, macro_block_size=16, codec="libx264", quality=7) as writer:
        for t in tqdm(steps, desc="video", disable=not sys.stderr.isatty()):
            image.set_data(record.pictures[t])
            title.set_text(f"{args.env_id}   step {t}   score {score[t]:,.0f}")
            width = max(1.06 * samples[:, t].std() * NUM_SAMPLES**-0.2, grid[1] - grid[0])
            curve = np.exp(-0.5 * ((grid[:, None] - samples[:, t]) / width) ** 2).sum(1)
            shape.set_xy(np.column_stack([np.r_[limits[0], grid, limits[1]], np.r_[0, curve / curve.max(), 0]]))
            came.set_xdata([returns[t]] * 2)
            target.set_xdata([x[t]] * 2)
            past = slice(0, t + 1)
            band.set_data(steps[past], low[past], high[past])
            middle.set_data(steps[past], median[past])
            truths.set_data(steps[past], returns[past])
            if u is not None:
                gain.set_data(steps[past], u[past])
            figure.canvas.restore_region(background)
            for axis, artist in artists:
                axis.draw_artist(artist)
            writer.append_data(np.asarray(figure.canvas.buffer_rgba())[..., :3])
    os.replace(temporary, path)
    plt.close(figure)


def draw_report(plt, script, agent, args, record, path, title):
    """Four panels on the steps whose return is known."""
    truth = look_back(script, agent, args, record)
    usable = record.counts & truth.known
    if not usable.any():
        fail("--report needs returns that came true, but every episode was cut too early for that (see docs/evaluate.md).")
    some = torch.randperm(int(usable.sum()))[:5000]
    c, returns, x = (values[usable][some] for values in (record.embeddings, truth.returns, truth.x))
    samples = torch.cat([agent.return_model.sample(part, NUM_SAMPLES) for part in c.split(250)], 1)
    pit, pit_x, stds = probability_integral(samples, returns), probability_integral(samples, x), samples.std(0).numpy()
    error = (samples.mean(0) - returns).square().mean().sqrt().item()
    levels = torch.linspace(0, 1, 101)

    figure, axes = plt.subplots(2, 2, figsize=(11, 9), dpi=120, layout="constrained")
    calibration, histogram, sharpness, gain = axes.flat
    calibration.plot([0, 100], [0, 100], color=GREY, ls="--", label="ideal")
    for truths, color, name in ((pit, ORANGE, "return"), (pit_x, "black", "target x")):
        covered = 100 * coverage(truths, levels)
        style = "-" if truths is pit else ":"
        calibration.plot(100 * levels, covered, color=color, ls=style, lw=2.5, label=f"{name}: {covered[80]:.0f} %")
    calibration.set(xlabel="central interval of the samples (%)", ylabel="came true inside it (%)", xlim=(0, 100), ylim=(0, 100))
    calibration.set_title("Calibration")
    calibration.legend(frameon=False, loc="upper left", title="inside 80 %", alignment="left")
    weight = np.full(len(pit), 20 / len(pit))
    histogram.hist(pit.numpy(), bins=20, range=(0, 1), weights=weight, color=BLUE, alpha=0.6)
    histogram.axhline(1, color=GREY, ls="--", label="ideal")
    histogram.set(xlabel="quantile at which the return came true (PIT)", ylabel="density", xlim=(0, 1), title="Where returns fall")
    histogram.legend(frameon=False, loc="upper center")
    sharpness.hist(stds, bins=np.linspace(0, 1.05 * max(stds.max(), error), 60), color=BLUE, alpha=0.6, label="predicted std")
    sharpness.axvline(error, color=ORANGE, lw=3, label="rms error of the mean")
    sharpness.set(xlabel="std of the return (scaled rewards)", ylabel="states", title="Sharpness")
    sharpness.set(xlim=(0, None), ylim=(0, 1.35 * sharpness.get_ylim()[1]))  # room for the legend
    sharpness.locator_params(axis="x", nbins=5)  # more numbers would run into each other
    sharpness.legend(frameon=False, loc="upper center")
    if truth.u is None:
        gain.axis("off")
    else:
        draw_gain(gain, truth.u, record)
    episodes = int((record.dones & record.counts).sum())
    figure.suptitle(f"{title}\n{len(returns):,} states of {episodes:,} learning episodes", fontsize=14)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary)
    os.replace(temporary, path)
    plt.close(figure)


def draw_gain(axis, u, record):
    """Information gain against the step of the learning episode: median, middle half and middle 90 % in up to 40 bins."""
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
    for name, least in (("episodes", 1), ("video_steps", 1), ("seed", 0)):
        if getattr(options, name) < least:
            fail(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(options, name)}.")
    if options.seed >= 2**30:
        fail(f"--seed must be less than 2**30, not {options.seed}.")
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a screen; must be set before MuJoCo is imported
    checkpoint, path, script = load(options.path)
    output = options.output or path.parent / "evaluation.json"
    if output.suffix != ".json" or not os.access(output.parent, os.W_OK) or output.is_dir():
        fail(f"{output} cannot be written; --output must name a .json file in a folder that exists.")
    num_envs = min(options.episodes, 8)
    agent, args, envs, global_step = rebuild(script, checkpoint, path, num_envs)
    # What the pictures need is looked for before the long part, not after it.
    plt = need_matplotlib() if options.video or options.report else None
    if options.video:
        imageio = need_encoder()
        filmed = make_camera(script, script.Args(**vars(args) | {"num_envs": 1}), options.seed)

    quotas = [options.episodes // num_envs + (i < options.episodes % num_envs) for i in range(num_envs)]
    keep = MAX_REPORT_STEPS // num_envs if options.report else 0
    with tqdm(total=options.episodes, unit=" episodes", disable=not sys.stderr.isatty()) as progress:
        episodes, record = play(script, agent, envs, options.seed, quotas, options.deterministic, keep=keep, progress=progress)
    envs.close()
    scores = [episode["score"] for episode in episodes]
    summary = summarise(scores)
    result = summary | {f"{name}s": [episode[name] for episode in episodes] for name in ("score", "length", "seed")}
    result |= {"env_id": args.env_id, "script": checkpoint["script"], "checkpoint": str(path), "global_step": global_step}
    result |= {"command": shlex.join(["python", *sys.argv]), "deterministic": options.deterministic}
    packages = ("torch", "numpy", "gymnasium", "mujoco", "ale-py")
    versions = {package.name: package.version for package in distributions() if package.name in packages}
    result["versions"] = {"python": platform.python_version(), **versions}
    if options.report:
        title = f"{args.env_id}, {script.__name__} after {global_step:,} steps"
        draw_report(plt, script, agent, args, record, output.with_suffix(".png"), title)
    temporary = output.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(temporary, output)
    low, high = summary["mean_95"]
    print(
        f"{args.env_id} after {global_step:,} steps, {len(scores)} episode{'s' * (len(scores) > 1)}: mean {summary['mean']:.1f} "
        f"(95 % interval {low:.1f} to {high:.1f}), std {summary['std']:.1f}, median {summary['median']:.1f}\n{output}"
    )
    if options.report:
        print(output.with_suffix(".png"))
    if options.video:
        film(plt, imageio, script, agent, args, options, output.with_suffix(".mp4"), *filmed)
        filmed[0].close()
        print(output.with_suffix(".mp4"))
    return result


if __name__ == "__main__":
    evaluate(tyro.cli(Args))
