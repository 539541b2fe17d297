"""The documentation says what is there: commands, line references, logged metrics, arguments."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {"bdpg": [], "ppo_wgan": ["ppo_wgan"], "ppo_qr": ["ppo_qr"]}  # beside bdpg.md, which explains what all scripts log
SCRIPTS = ["bdpg_atari.py", "bdpg_mujoco.py", "ppo_wgan_atari.py", "ppo_wgan_mujoco.py", "ppo_qr_atari.py"]


def test_ci_runs_the_readmes_test_command():
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    command = next(block.strip() for block in blocks if "pytest" in block)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_line_references_point_at_the_quoted_code(page):
    for code, line, file, anchor in re.findall(r"`([^`]+)` \(\[line (\d+)\]\(\.\./(\w+\.py)#L(\d+)\)\)", page.read_text()):
        assert line == anchor
        lines = (ROOT / file).read_text().splitlines()
        assert code in lines[int(line) - 1], f"{page.name}: {code!r} is not on line {line} of {file}"


def anchors(page):
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if not target.startswith("http"):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_commands_use_arguments_that_exist(page):
    known = {}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("benchmark/*.py")]:
        known[str(path.relative_to(ROOT))] = set(re.findall(r"^    (\w+): .+$", path.read_text(), re.M))
    known["benchmark/toy_density.py"] = set().union(*(known[script] for script in SCRIPTS))
    for script, rest in re.findall(r"python ((?:benchmark/)?\w+\.py)([^\n`#]*)", page.read_text()):
        for option in re.findall(r"--([a-z][a-z0-9-]*)", rest):
            names = {option.replace("-", "_"), option.removeprefix("no-").replace("-", "_")}
            assert option == "help" or names & known[script], f"{page.name}: {script} has no --{option}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_logged_metric_is_explained(script):
    source = (ROOT / script).read_text()
    page = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ["bdpg", *PAGES[script.rsplit("_", 1)[0]]])
    tags = set(re.findall(r'"((?:charts|return_model|curiosity)/\w+)"', source))
    for pattern in (r'losses\["(\w+)"\]', r'"(\w+)": (?:accuracy|grad_norm)'):
        tags |= {f"losses/{name}" for name in re.findall(pattern, source)}
    assert len(tags) > 9
    missing = [tag for tag in tags if f"`{tag}`" not in page]
    assert not missing, missing


def test_python_of_the_docs_runs_as_it_stands(trained, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "evaluate.md").read_text(), re.S)
    names = {}
    exec(code.replace("runs/NAME", str(trained["bdpg_mujoco"])), names)
    assert names["returns"].shape == (1000, 2) and names["returns"].std() > 0
    low, middle, high = names["returns"].quantile(names["torch"].tensor([0.1, 0.5, 0.9]), 0)
    assert (low < middle).all() and (middle < high).all()
    assert capsys.readouterr().out.startswith("tensor([[")
