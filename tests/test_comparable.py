"""Each script is complete, so shared code stands in several files: whatever is not tagged as a variant's own must not drift."""

import re
from types import SimpleNamespace

import pytest

from benchmark import compare

SOURCES = compare.read_sources()
ATARI = [file for file in compare.FILES if file.endswith("atari.py")]
WGAN = ["ppo_wgan_atari.py", "ppo_wgan_mujoco.py"]
CLOSE = [("bdpg_atari.py", "ppo_wgan_atari.py"), ("bdpg_atari.py", "ppo_qr_atari.py"), ("bdpg_mujoco.py", "ppo_wgan_mujoco.py")]

# In the named files the first text is replaced by the second.
CHANGES = {
    "default": ("ppo_wgan_atari.py", "    gamma: float = 0.99\n", "    gamma: float = 0.995\n"),
    "listed default": ("bdpg_mujoco.py", "    num_steps: int = 256\n", "    num_steps: int = 512\n"),
    "default in the own groups of two variants": (WGAN, "    latent_dim: int = 2\n", "    latent_dim: int = 3\n"),
    "type": ("ppo_qr_atari.py", "    seed: int = 1\n", "    seed: float = 1\n"),
    "help text": ("ppo_wgan_mujoco.py", '"""weight of the entropy bonus"""', '"""weight of the bonus for entropy"""'),
    "extra argument in a shared group": (
        "ppo_qr_atari.py",
        "    # --- PPO ---\n",
        '    # --- PPO ---\n    huber: bool = False\n    """use the Huber loss"""\n',
    ),
    "name of a function": ("benchmark/ppo_scalar_mujoco.py", "discounted_sums(", "discounted_rewards("),
    "constant in a function": ("ppo_wgan_atari.py", "torch.sqrt(self.var + 1e-8)", "torch.sqrt(self.var + 1e-6)"),
    "function that two variants have": (WGAN, "hidden[0]), 3.0)", "hidden[0]), 2.0)"),
    "name of a section": ("benchmark/ppo_scalar_atari.py", "# --- logging ---", "# --- logs ---"),
    "section in a region": ("ppo_qr_atari.py", "# QR:\ndef quantile_loss", "# QR:\n# --- QR losses ---\ndef quantile_loss"),
    "deleted line": ("ppo_qr_atari.py", "        global_step += batch_size\n", ""),
    "added line": (
        "ppo_wgan_mujoco.py",
        "                losses = {}\n",
        "                losses = {}\n                x = x.detach()\n",
    ),
    "order of two lines": (
        "ppo_wgan_atari.py",
        "            episode_returns += reward\n            episode_lengths += 1\n",
        "            episode_lengths += 1\n            episode_returns += reward\n",
    ),
    "comment": ("benchmark/ppo_scalar_atari.py", "# the only trunk pass", "# one trunk pass"),
    "import": ("ppo_qr_atari.py", "import tyro\n", "import tyro as tyro\n"),
    "error message": ("bdpg_mujoco.py", "is not a readable checkpoint", "is no readable checkpoint"),
    "indentation": (
        "ppo_wgan_atari.py",
        "                episode_returns[i] = episode_",
        "            episode_returns[i] = episode_",
    ),
    "blank line": ("ppo_qr_atari.py", "\n\n        # --- logging ---", "\n        # --- logging ---"),
    "removed tag": ("ppo_qr_atari.py", "# QR:\ndef quantile_loss", "def quantile_loss"),
    "another variant's tag": ("ppo_qr_atari.py", "# QR:\ndef quantile_loss", "# BDPG:\ndef quantile_loss"),
    "another task's tag": ("bdpg_mujoco.py", "# MuJoCo:\nclass Policy", "# Atari:\nclass Policy"),
    "region run together with what follows": ("bdpg_mujoco.py", "// args.minibatch_size\n\n", "// args.minibatch_size\n"),
    "task's region in one variant": ("ppo_wgan_mujoco.py", "    output_dim = 64\n", "    output_dim = 32\n"),
    "variant's region in one task": ("ppo_wgan_mujoco.py", "class ReturnModel(nn.Module)", "class ReturnModel(torch.nn.Module)"),
    "variant's region of the scalar critic": (
        "benchmark/ppo_scalar_mujoco.py",
        "nn.Linear(state_dim, 1)",
        "nn.Linear(state_dim, 2)",
    ),
}
ALLOWED = {
    "variant's function and lines in train": ("ppo_qr_atari.py", "quantile_loss(", "pinball_loss("),
    "variant's argument": ("ppo_qr_atari.py", "    num_quantiles: int", "    quantiles: int"),
    "docstring": ("ppo_qr_atari.py", '"""PPO with', '"""The baseline PPO with'),
    "new region": (
        "ppo_qr_atari.py",
        "                losses = {}\n",
        "                losses = {}\n                # QR:\n                x = x.detach()\n\n",
    ),
    "tagged line": ("ppo_qr_atari.py", "import tyro\n", "import tyro\nimport scipy  # QR: its splines\n"),
    "task's region in all its scripts": (ATARI, "    output_dim = 512\n", "    output_dim = 256\n"),
    "all scripts alike": (compare.FILES, "    gamma: float = 0.99\n", "    gamma: float = 0.995\n"),
}


def changed(files, old, new):
    files = [files] if isinstance(files, str) else files
    assert all(old in SOURCES[file] for file in files), "there is no such text to change"
    return SOURCES | {file: SOURCES[file].replace(old, new) for file in files}


def test_siblings_differ_only_where_they_say_so():
    found = compare.check(SOURCES)
    assert not found, "the first one first, others may follow from it:\n\n" + "\n\n".join(found)


@pytest.mark.parametrize("files, old, new", CHANGES.values(), ids=CHANGES)
def test_a_change_of_what_is_shared_is_caught(files, old, new):
    found = compare.check(changed(files, old, new))
    assert found and f"change {files if isinstance(files, str) else files[0]}," in found[0]


def test_sections_in_another_order_are_caught():
    file = "ppo_wgan_atari.py"
    head, environments, functions, *rest = re.split(r"^(?=# --- )", SOURCES[file], flags=re.M)
    found = compare.check(SOURCES | {file: "".join([head, functions, environments, *rest])})
    assert any(text.startswith(f"sections: change {file}") for text in found)


@pytest.mark.parametrize("files, old, new", ALLOWED.values(), ids=ALLOWED)
def test_a_change_of_what_is_a_variants_own_is_allowed(files, old, new):
    assert not compare.check(changed(files, old, new))


def test_drift_is_shown_with_file_and_line():
    reference, file, old, new = "bdpg_atari.py", "ppo_qr_atari.py", "self.mean.lerp_(mean, share)", "self.mean.lerp_(mean, 0.1)"
    line, reference_line = (SOURCES[name].split(old)[0].count("\n") + 1 for name in (file, reference))
    (found,) = compare.check(changed(file, old, new))
    assert found.split("\n") == [
        "outside BDPG and QR regions: change ppo_qr_atari.py, or tag what is its own (bdpg_atari.py is the reference)",
        f"--- {reference}",
        f"+++ {file}",
        f"@@ {reference}:{reference_line} {file}:{line} @@",
        f"-        {old}",
        f"+        {new}",
    ]


def test_what_a_tag_covers():
    source = """\
'''A docstring
of two lines.'''
import os  # QR: one line
import sys
class Args:
    a: int = 1
    # --- QR ---
    b: int = 2
# QR:
@decorator
def own():
    a = 1

    return a
def shared():
    a = "# QR: no comment"
    # QR:
    for b in a:
        c(b)

    if a:
        # QR: up to the end of the block
        d()
    return a
"""
    own = [1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 14, 17, 18, 19, 22, 23]
    assert sorted(compare.own_lines(source, "QR")) == own
    assert compare.own_lines(source, "WGAN") == {1, 2}


def test_every_listed_default_is_used_and_differs():
    for name, values in compare.DEFAULTS.items():
        for task, value in values.items():
            fields = [f"    {name}: {kind} = {value}\n" for kind in ("str", "int", "float")]
            files = [file for file in compare.FILES if compare.tags(file)[1] == task]
            assert any(field in SOURCES[file] for field in fields for file in files), f"{name} of {task}"
        assert values["Atari"] != values["MuJoCo"]


def test_siblings_are_close():
    for one, other in CLOSE:
        assert sum(compare.diff_size(SOURCES[one], SOURCES[other])) <= 220, (one, other)


def test_diff_size_counts_lines_of_code():
    assert compare.diff_size("a\nb\n\n# c\nd\n", "a\n  # e\nd\nf\n\ng\n") == (1, 2)


def test_gradient_steps_count_loops():
    steps = {file: compare.gradient_steps(SOURCES[file], SimpleNamespace(num_critic_steps=5)) for file in compare.FILES}
    by_variant = {"BDPG": 3, "WGAN": 6, "QR": 1, "Scalar": 1}
    assert steps == {file: by_variant[compare.tags(file)[0]] for file in compare.FILES}


def test_the_page_is_up_to_date():
    page = compare.PAGE.read_text()
    assert f"| generator {512 + 1:,} |" in page  # the scalar critic on Atari: one layer on an embedding of 512
    assert page == compare.up_to_date(page, SOURCES), "run `python benchmark/compare.py --write`"
