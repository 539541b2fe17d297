"""Are the scripts still comparable? Checks that siblings differ in what makes them different, and in nothing else.

A comment `# BDPG:` (WGAN, QR, Scalar, Atari, MuJoCo) opens a region that is the variant's or the task's own: at top level the
statement after it; indented, the lines up to a blank or less indented one; behind code, that line. So are the module docstring and,
for a variant, its own group of arguments. All other lines of siblings must be equal to the letter. Prints drift and diff sizes:

    python benchmark/compare.py
    python benchmark/compare.py --write     # and brings the tables of docs/compare.md up to date
"""

import ast
import functools
import importlib
import io
import itertools
import math
import re
import sys
import tokenize
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import tyro
from gymnasium.spaces import Box, Discrete

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # the scripts are imported to be measured
PAGE = ROOT / "docs" / "compare.md"
VARIANTS = {"bdpg": "BDPG", "ppo_wgan": "WGAN", "ppo_qr": "QR", "ppo_scalar": "Scalar"}
TASKS = {"atari": "Atari", "mujoco": "MuJoCo"}
SIBLINGS = [  # the reference first, and references before what is compared with them
    ("bdpg_atari.py", "bdpg_mujoco.py"),
    ("bdpg_atari.py", "ppo_wgan_atari.py"),
    ("bdpg_atari.py", "ppo_qr_atari.py"),
    ("bdpg_atari.py", "benchmark/ppo_scalar_atari.py"),
    ("bdpg_mujoco.py", "ppo_wgan_mujoco.py"),
    ("bdpg_mujoco.py", "benchmark/ppo_scalar_mujoco.py"),
    ("ppo_wgan_atari.py", "ppo_wgan_mujoco.py"),
    ("benchmark/ppo_scalar_atari.py", "benchmark/ppo_scalar_mujoco.py"),
]
FILES = list(dict.fromkeys(itertools.chain(*SIBLINGS)))
DEFAULTS = {  # the only defaults in which the tasks may differ, as they stand in the scripts
    "env_id": {"Atari": '"BreakoutNoFrameskip-v4"', "MuJoCo": '"Hopper-v5"'},
    "total_timesteps": {"Atari": "10_000_000", "MuJoCo": "1_000_000"},
    "num_steps": {"Atari": "128", "MuJoCo": "256"},
    "learning_rate": {"Atari": "2.5e-4", "MuJoCo": "3e-4"},
    "update_epochs": {"Atari": "4", "MuJoCo": "10"},
    "clip_coef": {"Atari": "0.1", "MuJoCo": "0.2"},
    "ent_coef": {"Atari": "0.01", "MuJoCo": "0.0"},
    "score_interval": {"Atari": "80", "MuJoCo": "4"},
    "eta": {"Atari": "0.1", "MuJoCo": "0.0"},
    "adversarial_learning_rate": {"Atari": "5e-4", "MuJoCo": "1e-3"},
    "critic_learning_rate": {"Atari": "5e-4", "MuJoCo": "1e-3"},
}


@dataclass
class Args:
    write: bool = False
    """bring the tables of docs/compare.md up to date"""


class Line(NamedTuple):
    number: int
    text: str
    blanks: int | None = 0  # blank lines before it; None beside a region, where they do not count


def read_sources():
    return {file: (ROOT / file).read_text() for file in FILES}


def tags(file):
    """The variant's and the task's tag: ("QR", "Atari") of ppo_qr_atari.py."""
    variant, task = Path(file).stem.rsplit("_", 1)
    return VARIANTS[variant], TASKS[task]


def args_class(tree):
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args")


@functools.cache
def own_lines(source, tag):
    """The numbers of the lines that are a tag's own."""
    lines, tree = source.split("\n"), ast.parse(source)
    own = set(range(1, tree.body[0].end_lineno + 1))  # the module docstring
    for comment in tokenize.generate_tokens(io.StringIO(source).readline):
        if comment.type != tokenize.COMMENT or not comment.string.startswith(f"# {tag}:"):
            continue
        first, indent = comment.start
        last = first
        if not lines[first - 1][:indent].strip():  # not behind code
            if indent == 0:
                last = next((node.end_lineno for node in tree.body if node.lineno > first), first)
            while indent and lines[last].strip() and lines[last].startswith(" " * indent):
                last += 1
        own |= set(range(first, last + 1))
    args = args_class(tree)
    group = [n for n in range(args.lineno, args.end_lineno + 1) if lines[n - 1] == f"    # --- {tag} ---"]
    return own | set(range(group[0], args.end_lineno + 1) if group else ())


@functools.cache
def arguments(source, task):
    """Each argument's type, default and help; a default that is the listed one of its task reads the same for both tasks."""
    found, lines = {}, source.split("\n")
    for field, after in itertools.pairwise([*args_class(ast.parse(source)).body, None]):
        if isinstance(field, ast.AnnAssign):
            name, default = field.target.id, lines[field.value.lineno - 1][field.value.col_offset :]
            if name in DEFAULTS:
                listed = DEFAULTS[name][task]
                default = "as listed" if default == listed else f"{default} (listed for {task}: {listed})"
            text = ast.unparse(after) if isinstance(after, ast.Expr) else "no help text"
            found[name] = Line(field.lineno, f"    {name}: {ast.unparse(field.annotation)} = {default}  # {text}")
    return found


def shared_lines(source, tag):
    """What a file shares with the siblings that have another tag in the place of this one."""
    fields = arguments(source, tag) if tag in TASKS.values() else {}
    listed = {line.number: line.text for name, line in fields.items() if name in DEFAULTS}
    own, kept, blanks = own_lines(source, tag), [], 0
    for number, text in enumerate(source.split("\n"), 1):
        if number in own:
            blanks = None
        elif text.strip():
            kept.append(Line(number, listed.get(number, text), blanks))
            blanks = 0
        elif blanks is not None:
            blanks += 1
    return kept


def own_definitions(source, tag):
    """Functions and classes in a variant's regions, where another variant may have them too; but for the model, which differs."""
    lines, own = source.split("\n"), own_lines(source, tag)
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name != "ReturnModel"]
    spans = {node.name: range(node.lineno, node.end_lineno + 1) for node in nodes if node.lineno in own}
    return {name: [Line(number, lines[number - 1]) for number in span] for name, span in spans.items()}


def sections(file, source):
    """The comments that open sections, but for the one that opens the variant's own group of arguments."""
    own = f"# --- {tags(file)[0]} ---"
    lines = [Line(number, text) for number, text in enumerate(source.split("\n"), 1)]
    return [line for line in lines if re.fullmatch(r" *# --- .+ ---", line.text) and line.text.strip() != own]


def drift(what, one, a, other, b):
    """Where lines a of the file `one` and b of the file `other` differ, as a unified diff; "" where they do not."""
    hunks = []
    texts = [[line.text for line in lines] for lines in (a, b)]
    for kind, i, i_end, j, j_end in SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        if kind == "equal":
            for x, y in zip(a[i:i_end], b[j:j_end], strict=True):
                if x.blanks != y.blanks and None not in (x.blanks, y.blanks):
                    hunks.append((x, y, ["-"] * x.blanks + ["+"] * y.blanks + [f" {x.text}"]))
        else:
            x, y = a[min(i, len(a) - 1)], b[min(j, len(b) - 1)]
            hunks.append((x, y, [f"-{text}" for text in texts[0][i:i_end]] + [f"+{text}" for text in texts[1][j:j_end]]))
    shown = [f"{what}: change {other}, or tag what is its own ({one} is the reference)", f"--- {one}", f"+++ {other}"]
    for x, y, lines in hunks:
        shown += [f"@@ {one}:{x.number} {other}:{y.number} @@", *lines]
    return "\n".join(shown) if hunks else ""


def check(sources):
    """All drift, as texts that show it and say which file to change; to be mended in this order, as one may follow from another."""
    found, first_use = [], {}
    for one, other in SIBLINGS:
        axis = 0 if tags(one)[0] != tags(other)[0] else 1  # variants of one task, or one variant on two tasks
        mine, others = tags(one)[axis], tags(other)[axis]
        a, b = shared_lines(sources[one], mine), shared_lines(sources[other], others)
        found.append(drift(f"outside {mine} and {others} regions", one, a, other, b))
        if axis == 0:
            a, b = own_definitions(sources[one], mine), own_definitions(sources[other], others)
            found += [drift(f"{name} is in both", one, a[name], other, b[name]) for name in a if name in b]
    for file, source in sources.items():
        found.append(drift("sections", FILES[0], sections(FILES[0], sources[FILES[0]]), file, sections(file, source)))
        for name, line in arguments(source, tags(file)[1]).items():
            one, reference = first_use.setdefault(name, (file, line))
            found.append(drift(f"argument {name}", one, [reference], file, [line]))
    return [text for text in found if text]


def diff_size(a, b):
    """Lines of code, neither blank nor comment, that two sources do not share: (removed, added)."""
    a, b = ([line for line in source.split("\n") if line.strip() and line.strip()[0] != "#"] for source in (a, b))
    equal = sum(block.size for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks())
    return len(a) - equal, len(b) - equal


def gradient_steps(source, args):
    """How often `descend` is called for one minibatch; what stands in a loop counts as often as the loop runs."""

    def count(node):
        inside = sum(map(count, ast.iter_child_nodes(node)))
        if isinstance(node, ast.For):
            return inside * len(eval(ast.unparse(node.iter), {"args": args}))
        return inside + (isinstance(node, ast.Call) and ast.unparse(node.func) == "descend")

    minibatch = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.For) and ast.unparse(n.iter) == "minibatches")
    return sum(map(count, minibatch.body))


def measure(file, source):
    """Parameters of the return model's networks and of the whole agent, and gradient steps per minibatch, at default arguments."""
    script = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    spaces = SimpleNamespace(  # those of Breakout, whose observations the agent does not ask for, and of Hopper-v5
        single_observation_space=Box(-math.inf, math.inf, (11,)),
        single_action_space=Discrete(4) if tags(file)[1] == "Atari" else Box(-1, 1, (3,)),
    )
    args = script.Args(cuda=False)
    agent = script.Agent(spaces, args)
    sizes = {name: sum(p.numel() for p in net.parameters()) for name, net in agent.return_model.named_children()}
    return sizes, sum(p.numel() for p in agent.parameters()), gradient_steps(source, args)


def tables(sources):
    """The tables of docs/compare.md that are measured, by name."""
    link = lambda file: f"[`{file}`](../{file})"  # noqa: E731
    costs = ["| script | return model | together | whole agent | gradient steps per minibatch |", "|---|---|---|---|---|"]
    for file in sorted(FILES, key=lambda file: tags(file)[1]):
        sizes, total, steps = measure(file, sources[file])
        networks = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        costs.append(f"| {link(file)} | {networks} | {sum(sizes.values()):,} | {total:,} | {steps} |")
    distances = ["| from | to | removed | added | changed |", "|---|---|---|---|---|"]
    for one, other in SIBLINGS:
        removed, added = diff_size(sources[one], sources[other])
        distances.append(f"| {link(one)} | {link(other)} | {removed} | {added} | {removed + added} |")
    defaults = ["| argument | Atari | MuJoCo |", "|---|---|---|"]
    defaults += [f"| `{name}` | {value['Atari']} | {value['MuJoCo']} |" for name, value in DEFAULTS.items()]
    return {"costs": costs, "distances": distances, "defaults": defaults}


def up_to_date(page, sources):
    """The page with its measured tables, each between `<!-- name -->` and `<!-- end -->`, measured anew."""
    for name, rows in tables(sources).items():
        before, rest = page.split(f"<!-- {name} -->\n")
        page = "\n".join([f"{before}<!-- {name} -->", *rows, rest[rest.index("<!-- end -->") :]])
    return page


def main(args):
    sources = read_sources()
    found = check(sources)
    for one, other in SIBLINGS:
        removed, added = diff_size(sources[one], sources[other])
        print(f"{one:30s}{other:32s}{removed:4d} lines removed{added:4d} added")
    if args.write:
        PAGE.write_text(up_to_date(PAGE.read_text(), sources))
    if found:
        print("\n\n".join(["", *found, "Mend the first one first: others may follow from it."]), file=sys.stderr)
        raise SystemExit(1)
    print("no drift")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
