"""Each script is complete, so shared code stands in eight files: a change of it in only some of them is caught."""

import ast
import re
import unicodedata

import compare
import pytest

SOURCES = compare.read_sources()
ATARI = [file for file in compare.FILES if file.endswith("_atari.py")]
MUJOCO = [file for file in compare.FILES if file.endswith("_mujoco.py")]
BDPG, WGAN, QR = (
    ["bdpg_atari.py", "bdpg_mujoco.py"],
    ["ppo_wgan_atari.py", "ppo_wgan_mujoco.py"],
    ["ppo_qr_atari.py", "ppo_qr_mujoco.py"],
)

# Drift of what all scripts have, in one of them. VARIANT and TASK are the script's tags, OTHER and ELSEWHERE others.
SHARED = {
    "import": ("import tyro\n", "import tyro as tyro\n"),
    "import from elsewhere": ("import torch.nn.functional as F\n", "import torch.nn.init as F\n"),
    "extra import": ("import json\n", "import csv\nimport json\n"),
    "comment on an import": ("import fcntl\n", "import fcntl  # locks\n"),
    "type": ("    seed: int = 1\n", "    seed: float = 1\n"),
    "default": ("    gamma: float = 0.99\n", "    gamma: float = 0.995\n"),
    "deleted default": ("    gamma: float = 0.99\n", "    gamma: float\n"),
    "default that differs by task": ("    num_steps: int = ", "    num_steps: int = 1"),
    "help text": ('"""weight of the entropy bonus"""', '"""weight of the bonus for entropy"""'),
    "extra argument": (
        "    # --- PPO ---\n",
        '    # --- PPO ---\n    huber: bool = False\n    """use the Huber loss"""\n',
    ),
    "deleted argument": (
        '    anneal_lr: bool = True\n    """decay every learning rate linearly to 0 over the run"""\n',
        "",
    ),
    "name of a function": ("descend(", "step_down("),
    "extra function": ("def descend(", "def ascend():\n    pass\n\n\ndef descend("),
    "parameter of a function": ("def ppo_loss(log_prob,", "def ppo_loss(new_log_prob,"),
    "docstring of a function": ('"""One clipped step on the', '"""A clipped step on the'),
    "constant in a function": ("advantages.std() + 1e-8", "advantages.std() + 1e-6"),
    "constant in a method": ("torch.sqrt(self.var + 1e-8)", "torch.sqrt(self.var + 1e-6)"),
    "base of a class": ("class Agent(nn.Module)", "class Agent(torch.nn.Module)"),
    "docstring of a class": ('"""Copies of the ', '"""A copy of the '),
    "extra method": ("    def observe(", "    def act(self):\n        pass\n\n    def observe("),
    "task's own method": ("def observe(self, obs)", "def observe(self, frames)"),
    "task's own class": ("class Policy(nn.Module)", "class Policy(torch.nn.Module)"),
    "task's own marked line": ("  # TASK:", "  # TASK: well"),
    "other statement": ("STOP_SIGNALS = []\n", "STOP_SIGNALS = list()\n"),
    "last statement": (
        '\n\nif __name__ == "__main__":\n    main()\n',
        '\n\nif __name__ == "__main__":\n    raise SystemExit(main())\n',
    ),
    "comment at the end": (
        '\n\nif __name__ == "__main__":\n    main()\n',
        '\n\nif __name__ == "__main__":\n    main()\n# the end\n',
    ),
    "name of a section": ("# --- networks ---", "# --- nets ---"),
    "extra section": ("class Agent(", "# --- agent ---\nclass Agent("),
    "name of a group of arguments": ("    # --- PPO ---\n", "    # --- the algorithm ---\n"),
    "name of a section in a function": ("# --- logging ---", "# --- logs ---"),
    "deleted line": ("            global_step += args.num_envs\n", ""),
    "added line": ("        history = []\n", "        history = []\n        x = x.detach()\n"),
    "order of two lines": (
        "            global_step += args.num_envs\n            episode_returns += reward\n",
        "            episode_returns += reward\n            global_step += args.num_envs\n",
    ),
    "comment": ("# the only trunk pass", "# one trunk pass"),
    "comment before a function": ("def say(", "# Speaks.\ndef say("),
    "error message": ("is no intact checkpoint", "is not an intact checkpoint"),
    "indentation": ("                episode_returns[i] = 0\n", "            episode_returns[i] = 0\n"),
    "blank line": ("\n\n        # --- logging ---", "\n        # --- logging ---"),
    "removed variant's tag": ("            # VARIANT: ", "            # "),
    "removed task's tag": ("        # TASK: ", "        # "),
    "another variant's tag": ("            # VARIANT: ", "            # OTHER: "),
    "another task's tag": ("        # TASK: ", "        # ELSEWHERE: "),
    "variant's lines run together with what follows": (
        "\n\n                policy = agent.policy(",
        "\n                policy = agent.policy(",
    ),
    "task's lines run together with what follows": (
        "\n\n        self.reward_stats = ",
        "\n        self.reward_stats = ",
    ),
}
# Drift of what some scripts have: in the named files, the first text is replaced by the second.
PARTLY_SHARED = {
    "docstring of a variant": ("bdpg_atari.py", "z, s).\nHow far", "z, s);\nhow far"),
    "class of a variant": ("ppo_wgan_mujoco.py", "class ReturnModel(nn.Module)", "class ReturnModel(torch.nn.Module)"),
    "method of a variant": ("bdpg_mujoco.py", "F.softplus(raw_std)", "raw_std.exp()"),
    "function of a variant": ("ppo_qr_mujoco.py", "+ 0.5) / n", "+ 1) / n"),
    "name of a variant's function": ("ppo_qr_atari.py", "quantile_loss(", "pinball_loss("),
    "argument of a variant": ("ppo_qr_atari.py", "    num_quantiles: int = 16\n", "    num_quantiles: int = 32\n"),
    "blank line after a variant's lines": ("ppo_atari.py", "\n\n        # --- minibatch", "\n        # --- minibatch"),
    "name of a variant's argument": ("bdpg_atari.py", "    u_bar: float", "    u_max: float"),
    "marked line of a variant": ("ppo_mujoco.py", "F.mse_loss(agent.value(c)", "F.l1_loss(agent.value(c)"),
    "place of a variant's lines": (
        "bdpg_atari.py",
        '    ranges["u_bar"] = (0, math.inf)  # BDPG: its own\n    for name, value in vars(args).items():\n',
        '    for name, value in vars(args).items():\n        ranges["u_bar"] = (0, math.inf)  # BDPG: its own\n',
    ),
    "class of a task": ("ppo_wgan_atari.py", "class Trunk(nn.Module)", "class Trunk(torch.nn.Module)"),
    "function of a task": ("ppo_qr_mujoco.py", "zip(sizes, sizes[1:], strict=False)", "itertools.pairwise(sizes)"),
    "argument of a task": ("bdpg_mujoco.py", "    log_std_init: float = -1.0\n", "    log_std_init: float = -0.5\n"),
    "name of a task's argument": (QR[:1], "bf16", "bfloat16"),
    "marked line of a task": ("ppo_atari.py", "        state_dim = 512\n", "        state_dim = 256\n"),
    "class of two variants": (WGAN, "from_inputs.weight, 3.0)", "from_inputs.weight, 2.0)"),
    "argument of two variants": (WGAN, "    latent_dim: int = 2\n", "    latent_dim: int = 3\n"),
    "argument of three variants": (QR, "    num_return_samples: int = 8\n", "    num_return_samples: float = 8\n"),
    "function of two tasks": ("bdpg_atari.py", "zip(sizes, sizes[1:], strict=False)", "itertools.pairwise(sizes)"),
    "shared lines of a variant on both tasks": (BDPG, "advantages.std() + 1e-8", "advantages.std() + 1e-6"),
    "shared lines of a task in all variants": (ATARI, "advantages.std() + 1e-8", "advantages.std() + 1e-6"),
    "default of one argument as another's": (MUJOCO, "    num_envs: int = 16\n", "    num_envs: int = 8\n"),
}
ALLOWED = {
    "variant's function and lines": (QR, "quantile_loss(", "quantile_loss(*"),
    "variant's argument": (QR, "    num_quantiles: int", "    quantiles: int"),
    "variant's docstring": (QR, "The paper's baseline", "A baseline"),
    "new lines of a variant": (
        QR,
        "        history = []\n",
        "        history = []\n        # QR:\n        x = x.detach()\n\n",
    ),
    "new marked line": (BDPG, "        history = []\n", "        history = []\n        spare = []  # BDPG: its own\n"),
    "new marked import": (QR, "import tyro\n", "import tyro\nimport scipy  # QR: its splines\n"),
    "new marked function": (QR, "def descend(", "def knots(x):  # QR:\n    return x\n\n\ndef descend("),
    "task's lines in all variants": (ATARI, "        state_dim = 512\n", "        state_dim = 256\n"),
    "task's function in all its scripts": ([*MUJOCO, "bdpg_atari.py"], "strict=False)]", "strict=False)][:]"),
    "task's default in all variants": (MUJOCO, "    update_epochs: int = 10\n", "    update_epochs: int = 8\n"),
    "line that is both's own": (
        "ppo_wgan_mujoco.py",
        "ReturnModel(state_dim, (64, 64)",
        "ReturnModel(state_dim, (64, 32)",
    ),
    "all scripts alike": (compare.FILES, "    gamma: float = 0.99\n", "    gamma: float = 0.995\n"),
}


def changed(files, old, new):
    sources = dict(SOURCES)
    for file in [files] if isinstance(files, str) else files:
        variant, task = file.removesuffix(".py").rsplit("_", 1)
        texts = [old, new]
        for word, tag in {
            "VARIANT": compare.VARIANTS[variant],
            "TASK": compare.TASKS[task],
            "OTHER": "WGAN" if variant == "bdpg" else "BDPG",
            "ELSEWHERE": "MuJoCo" if task == "atari" else "Atari",
        }.items():
            texts = [text.replace(word, tag) for text in texts]
        assert texts[0] in sources[file], f"there is no such text to change in {file}"
        sources[file] = sources[file].replace(*texts)
    return sources


def blamed(found):
    """The scripts that the texts of found say to change, each as certainly as they say it."""
    return {text.splitlines()[0].split(": change ")[1] for text in found}


def test_siblings_differ_only_where_they_say_so():
    found = compare.check(SOURCES)
    assert not found, "the first one first, others may follow from it:\n\n" + "\n\n".join(found)


@pytest.mark.parametrize("old, new", SHARED.values(), ids=SHARED)
def test_drift_of_one_script_is_caught(old, new):
    for file in compare.FILES:
        assert blamed(compare.check(changed(file, old, new))) == {file}


@pytest.mark.parametrize("files, old, new", PARTLY_SHARED.values(), ids=PARTLY_SHARED)
def test_drift_of_what_some_scripts_have_is_caught(files, old, new):
    named = " ".join(blamed(compare.check(changed(files, old, new))))
    assert all(file in named for file in ([files] if isinstance(files, str) else files))


@pytest.mark.parametrize("files, old, new", ALLOWED.values(), ids=ALLOWED)
def test_a_change_of_what_is_the_variants_or_the_tasks_own_is_allowed(files, old, new):
    assert not compare.check(changed(files, old, new))


ORDERS = {  # what stands from the first text to the second changes places with what stands from there to the third
    "arguments": ("    gamma: ", "    gae_lambda: ", "    target: "),
    "sections": ("# --- environments ---", "# --- running statistics", "# --- networks ---"),
    "functions": ("def start_run(", "def save_checkpoint(", "def load_checkpoint("),
    "methods": ("    def __init__(self, shape", "    def update(", "def k_step_gae("),
}


@pytest.mark.parametrize("first, second, third", ORDERS.values(), ids=ORDERS)
def test_another_order_in_one_script_is_caught(first, second, third):
    for file, source in SOURCES.items():
        a, b, c = source.index(first), source.index(second), source.index(third)
        found = compare.check(SOURCES | {file: source[:a] + source[b:c] + source[a:b] + source[c:]})
        assert [text.splitlines()[0] for text in found] == [f"outline: change {file}"]


def test_drift_is_shown_with_file_and_line():
    reference, file, old, new = (
        "ppo_qr_atari.py",
        "ppo_atari.py",
        "self.mean.lerp_(mean, weight)",
        "self.mean.lerp_(mean, 0.1)",
    )
    reference_line, line = (SOURCES[name].split(old)[0].count("\n") + 1 for name in (reference, file))
    (found,) = compare.check(changed(file, old, new))
    assert found.split("\n") == [
        "RunningMeanStd.update: change ppo_atari.py",
        f"--- {reference}",
        f"+++ {file}",
        f"@@ {reference}:{reference_line} {file}:{line} @@",
        f"-        {old}",
        f"+        {new}",
    ]


def test_where_two_differ_either_may_be_the_one_to_change():
    (found,) = compare.check(changed("bdpg_atari.py", "F.softplus(raw_std)", "raw_std.exp()"))
    assert found.startswith("ReturnModel.encode: change bdpg_mujoco.py or bdpg_atari.py\n")


def test_what_a_tag_covers():
    source = """\
import os  # QR: one line
import sys
class Args:
    a: int = 1
    # --- PPO ---
    b: int = 2

    # --- QR ---
    c: int = 3
    d: int = 4

def shared():
    a = "# QR: no comment"
    # QR:
    for b in a:
        c(b)  # Atari: both

    if a:
        # QR, Atari: up to the end of the block
        d()
    # WGAN: another's
    return a
"""
    own = compare.marks(source, {"QR": "variant", "Atari": "task"})
    assert {number for number in own if "variant" in own[number]} == {1, 8, 9, 10, 11, 14, 15, 16, 17, 19, 20}
    assert {number for number in own if "task" in own[number]} == {16, 19, 20}


@pytest.mark.parametrize("file", compare.FILES)
def test_every_tag_is_needed(file):
    source = SOURCES[file]
    for match in re.finditer(r"# (Atari|MuJoCo|PPO|QR|WGAN|BDPG)(, \w+)?:", source):
        untagged = source[: match.start()] + "#" + source[match.end() :]
        assert compare.check(SOURCES | {file: untagged}), f"{match[0]} marks nothing that differs"


def test_every_listed_name_is_needed():
    scripts = {file: compare.units(file, source) for file, source in SOURCES.items()}
    for axis in compare.OWN:
        siblings = [[scripts[file] for file in files] for of, files in compare.SIBLINGS if of == axis]
        for name in compare.OWN[axis]:
            assert any(len({name in script for script in each}) == 2 for each in siblings), name
        for name in compare.OWN_TEXT[axis]:
            texts = [[[line.text for line in script[name]] for script in each if name in script] for each in siblings]
            assert any(text != each[0] for each in texts for text in each), name


@pytest.mark.parametrize("file", compare.FILES)
def test_scripts_are_short(file):
    lines = SOURCES[file].splitlines()
    assert len(lines) <= compare.MAX_LINES[file.rsplit("_", 1)[0]]
    assert max(len([c for c in line if not unicodedata.combining(c)]) for line in lines) <= 120


@pytest.mark.parametrize("task", compare.TASKS)
@pytest.mark.parametrize("variant", compare.MAX_DISTANCE)
def test_a_variant_is_a_small_change_of_ppo(variant, task):
    assert compare.distance(SOURCES[f"ppo_{task}.py"], SOURCES[f"{variant}_{task}.py"]) <= compare.MAX_DISTANCE[variant]


def test_distance_counts_lines_of_code():
    assert compare.distance("a\nb\n\n# c\nd\n", "a\n  # e\nd\nf\n\ng\n") == 3


@pytest.mark.parametrize("file", compare.FILES)
def test_a_script_imports_nothing_from_another_file_here(file):
    imported = set()
    for node in ast.walk(ast.parse(SOURCES[file])):
        if isinstance(node, ast.ImportFrom):
            assert not node.level
            imported.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
    assert not imported & {path.stem for path in compare.ROOT.iterdir()}
