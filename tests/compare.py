"""Are the scripts still comparable? Siblings may differ in what makes them different, and in nothing else.

A script is cut into units: its docstring, imported names, arguments and their defaults, functions, methods, all other
statements, and the outline, which is the order of these and of the section banners. All eight scripts have all units,
identical to the letter, but for the names in OWN and for lines that a comment marks as the variant's own (`# PPO:`,
`# QR:`, `# WGAN:`, `# BDPG:`), the task's own (`# Atari:`, `# MuJoCo:`) or both (`# WGAN, Atari:`). Behind code a mark
holds for its line; on a line of its own, as the banner of a variant's arguments is, for the lines up to a blank or less
indented one. What is a variant's own is the same on both tasks, what is a task's own is the same in all variants.

    python tests/compare.py     # prints lengths, distances and drift
"""

import ast
import difflib
import functools
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = {"ppo": "PPO", "ppo_qr": "QR", "ppo_wgan": "WGAN", "bdpg": "BDPG"}
TASKS = {"atari": "Atari", "mujoco": "MuJoCo"}
FILES = [f"{variant}_{task}.py" for variant in VARIANTS for task in TASKS]
SIBLINGS = [("variant", [f"{variant}_{task}.py" for variant in VARIANTS]) for task in TASKS]
SIBLINGS += [("task", [f"{variant}_{task}.py" for task in TASKS]) for variant in VARIANTS]
MAX_LINES = {"ppo": 530, "ppo_qr": 560, "ppo_wgan": 620, "bdpg": 680}
MAX_DISTANCE = {"ppo_qr": 60, "ppo_wgan": 140, "bdpg": 180}  # from the ppo script of the same task

OWN_TEXT = {  # names that stand for something else in each variant, or on each task; "x=" is the default of argument x
    "variant": {"docstring", "ReturnModel", "num_return_samples="},
    "task": {"Environments", "Policy", "Agent.observe", "env_id=", "total_timesteps=", "num_steps=", "learning_rate="}
    | {"update_epochs=", "norm_adv=", "clip_coef=", "ent_coef=", "max_grad_norm=", "eta="}
    | {"adversarial_learning_rate=", "adversarial_interval="},
}
OWN = {  # names that some variants have, or one task; two that have one have the same, but for OWN_TEXT
    "variant": {"math", "kl_divergence", "Normal", "tanh_mlp", "ConditionalMLP", "ReturnModel", "energy_distance"}
    | {"f_loss", "generator_losses", "quantile_loss"},
    "task": {"ale_py", "AtariVectorEnv", "Categorical", "Independent", "Normal", "tanh_mlp", "Trunk", "bf16"}
    | {"envpool", "log_std_init"},
}
MARK = re.compile(r"# (\w+)(?:, (\w+))?:|# --- (?!PPO)(\w+) ---$")  # the group of arguments "PPO" is everyone's


class Line(NamedTuple):
    number: int
    text: str
    own: frozenset = frozenset()  # of "variant" and "task"


def read_sources():
    return {file: (ROOT / file).read_text() for file in FILES}


def marks(source, tags):
    """Whose own each line is, where the tags ({"QR": "variant", "Atari": "task"}) say so."""
    lines, own = source.splitlines(), defaultdict(frozenset)
    for comment in tokenize.generate_tokens(io.StringIO(source).readline):
        match = comment.type == tokenize.COMMENT and MARK.match(comment.string)
        words = set(filter(None, match.groups())) if match else set()
        if words and words <= tags.keys():
            first, indent = comment.start
            last = first
            if not lines[first - 1][:indent].strip():  # not behind code
                while last < len(lines) and lines[last].strip() and lines[last].startswith(" " * indent):
                    last += 1
                last += last < len(lines) and not lines[last].strip()  # the blank line that ends it is part of it
            for number in range(first, last + 1):
                own[number] |= {tags[word] for word in words}
    return own


def statements(body, inside=""):
    """The statements of the script and of its classes, by name; imports once for each name; docstrings without one."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, type(node)(**vars(node) | {"names": [alias]})
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id, node
        elif isinstance(node, ast.Expr):
            yield None, node
        else:
            yield inside + (getattr(node, "name", None) or ast.unparse(node).splitlines()[0]), node
        if isinstance(node, ast.ClassDef):
            yield from statements(node.body, "" if node.name == "Args" else f"{node.name}.")


@functools.cache
def units(file, source):
    """The units of a script by name, as lists of lines."""
    variant, task = Path(file).stem.rsplit("_", 1)
    own = marks(source, {VARIANTS[variant]: "variant", TASKS[task]: "task"})
    lines = [Line(number, text, own[number]) for number, text in enumerate(source.splitlines(), 1)]
    last_name, outline, found, end = "docstring", [], {"docstring": []}, 0  # lines up to end are dealt with
    for name, node in statements(ast.parse(source).body):
        number, last = node.lineno, node.lineno if isinstance(node, ast.ClassDef) else node.end_lineno
        banners = [line for line in lines[end : number - 1] if re.fullmatch(r" *# --- .+ ---", line.text)]
        outline += [line._replace(text=line.text.strip()) for line in banners]
        unit, end = [line for line in lines[end:last] if line not in banners], max(end, last)
        if name is None:  # the script's, a class's or, after it, an argument's
            found[last_name] += unit
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            unit = [line for line in unit if line.text.startswith("#")]
            unit += [Line(number, ast.unparse(node) + "".join(lines[last - 1].text.partition("  #")[1:]))]
        elif isinstance(node, ast.AnnAssign):
            declaration, _, default = lines[number - 1].text.partition(" = ")
            found[f"{name}="] = [Line(number, default), *lines[number:last]]
            unit = [line for line in unit if line.number < number] + [Line(number, declaration)]
        owners = {axis for axis in OWN if {name, name.split(".")[0]} & OWN[axis]}
        outline.append(Line(number, name, own[number] | owners))
        last_name, found[name] = name, found.get(name, []) + unit
    found[last_name] += lines[end:]
    for line in outline:
        if own[line.number] and line.text in found:  # marked as a whole: two that have it have the same
            found[line.text] = [Line(*part[:2]) for part in found[line.text]]
    of_task = re.compile(r"Atari|continuous control|_(atari|mujoco)\.py")
    found["docstring"] = [line for line in found["docstring"] if not of_task.search(line.text)]
    return found | {"outline": outline}


def outside(lines, axes):
    """The lines that are not marked on these axes, without blank ones before and after them."""
    kept = [line for line in lines if not line.own & axes]
    filled = [index for index, line in enumerate(kept) if line.text.strip()]
    return kept[filled[0] : filled[-1] + 1] if filled else []


def drift(name, one, other, a, b, certain):
    """How lines b of a unit in the file `other` differ from lines a in the file `one`, as a unified diff."""
    shown = [f"{name}: change {other}{'' if certain else f' or {one}'}", f"--- {one}", f"+++ {other}"]
    texts = [[line.text for line in lines] for lines in (a, b)]
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        if kind != "equal":
            at = [lines[min(k, len(lines) - 1)].number if lines else "nothing" for lines, k in ((a, i), (b, j))]
            shown += [f"@@ {one}:{at[0]} {other}:{at[1]} @@", *(f"-{text}" for text in texts[0][i:i_end])]
            shown += [f"+{text}" for text in texts[1][j:j_end]]
    return "\n".join(shown)


def check(sources):
    """All drift, as texts that show it and say which file to change; one may follow from another before it."""
    scripts = {file: units(file, source) for file, source in sources.items()}

    def text(file, name, axes):
        return tuple(line.text for line in outside(scripts[file][name], axes))

    votes = Counter((name, text(file, name, set(OWN))) for file in scripts for name in scripts[file])
    found = {}
    for axis, files in SIBLINGS:
        for name in dict.fromkeys(name for file in files for name in scripts[file]):
            if {name, name.split(".")[0]} & OWN_TEXT[axis]:
                continue
            texts = {file: text(file, name, {axis}) for file in files if name in scripts[file]}
            alike = Counter(texts.values())
            # The more scripts say the same as a script, the likelier it is the others that drifted.
            rank = {file: (votes[name, text(file, name, set(OWN))], alike[texts[file]]) for file in texts}
            one = max(texts, key=rank.get)
            for other in texts:
                if texts[other] != texts[one] and (name, other) not in found:
                    lines = (outside(scripts[file][name], {axis}) for file in (one, other))
                    found[name, other] = drift(name, one, other, *lines, certain=rank[one] > rank[other])
    return list(found.values())


def code(source):
    return [line.rstrip() for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]


def distance(one, other):
    """Changed lines of code between two sources: those removed and those added, blank lines and comments aside."""
    lines = difflib.unified_diff(code(one), code(other), lineterm="", n=0)
    return sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in lines)


def main():
    sources = read_sources()
    for file, source in sources.items():
        floor = f"ppo_{file.rsplit('_', 1)[1]}"
        changed = distance(sources[floor], source)
        print(f"{file:18} {len(source.splitlines())} lines, {changed:3} of code removed or added since {floor}")
    found = check(sources)
    print("\n\n".join(["", *found]) if found else "no drift")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
