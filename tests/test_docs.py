"""The documentation says what is there (commands, links, code, metrics, arguments), and is short enough to be read."""

import importlib
import re
import runpy
from pathlib import Path

import pytest
from conftest import SCRIPTS, read_scalars

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = {"bdpg.md", "baselines.md", "results.md", "studies.md", "notes.md"}
DOCS = [README, *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(page, language=r"\w*"):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.S | re.M)


def test_ci_runs_the_readmes_test_command():
    command = next(block.strip() for block in code_blocks(README) if "pytest" in block)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_docs_can_be_finished():
    assert {page.name for page in DOCS[1:]} == PAGES
    assert len(README.read_text().split()) <= 1100
    assert sum(len(page.read_text().split()) for page in DOCS[1:]) <= 9000


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
            assert not anchor or (file.suffix == ".md" and anchor in anchors(file)), f"{page.name}: {target}#{anchor}"


def test_every_figure_is_shown():
    text = "".join(page.read_text() for page in DOCS)
    assert all(f"figures/{path.name}" in text for path in (ROOT / "docs" / "figures").iterdir())


def test_the_diagram_is_what_its_script_draws():
    script = runpy.run_path(str(ROOT / "docs" / "networks.py"))
    assert script["FIGURE"].read_text(encoding="utf-8") == script["draw"]()


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_commands_use_arguments_that_exist(page):
    known = {}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")]:
        known[str(path.relative_to(ROOT))] = set(re.findall(r"^    (\w+): .+$", path.read_text(), re.M))
    known["studies/toy_density.py"] = set().union(*(known[f"{script}.py"] for script in SCRIPTS))
    for script, rest in re.findall(r"python ((?:\w+/)*\w+\.py)([^\n`#]*)", page.read_text()):
        assert script in known, f"{page.name}: there is no {script}"
        for option in re.findall(r"--([a-z][a-z0-9-]*)", rest):
            names = {option.replace("-", "_"), option.removeprefix("no-").replace("-", "_")}
            assert option == "help" or names & known[script], f"{page.name}: {script} has no --{option}"


def test_the_readme_shows_the_update_as_it_stands():
    (shown,) = code_blocks(README, "python")
    source = (ROOT / "bdpg_atari.py").read_text()
    script = [line.strip() for line in source.splitlines()]
    place = 0
    for line in filter(None, map(str.strip, shown.splitlines())):
        assert line in script[place:], f"{line!r} is not in bdpg_atari.py, or not after the line before it"
        place = script.index(line, place) + 1


@pytest.mark.parametrize("heading", ["Algorithm 1 in the code", "Implementation details"])
def test_functions_that_the_docs_name_exist(heading):
    section = (ROOT / "docs" / "bdpg.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    sources = "".join((ROOT / f"bdpg_{task}.py").read_text() for task in ("atari", "mujoco"))
    names = re.findall(r"`(?:\w+\.)*(\w+)\(?\)?`", section)
    assert len(names) > 10
    assert not [name for name in names if not re.search(rf"\b{name}\b", sources)]


def test_every_logged_metric_is_explained(trained):
    for script in SCRIPTS:
        source = (ROOT / f"{script}.py").read_text()
        pages = {"docs/bdpg.md", re.search(r"docs/\w+\.md", source)[0]}  # that of the method, and what all scripts log
        text = "".join((ROOT / page).read_text() for page in pages)
        tags = set(re.findall(r'"((?:charts|return_model|curiosity)/\w+)"', source))
        tags |= read_scalars(trained[script]).keys()
        assert len(tags) > 9
        missing = sorted(tag for tag in tags if f"`{tag}`" not in text)
        assert not missing, f"{script}: {missing} are not explained in {sorted(pages)}"


def test_python_of_the_docs_runs_as_it_stands(trained, capsys):
    (code,) = code_blocks(ROOT / "docs" / "bdpg.md", "python")
    names = {}
    exec(code.replace("runs/NAME", str(trained["bdpg_mujoco"])), names)
    assert names["returns"].shape == (1000, 2) and names["returns"].std() > 0
    low, middle, high = names["returns"].quantile(names["torch"].tensor([0.1, 0.5, 0.9]), 0)
    assert (low < middle).all() and (middle < high).all()
    assert capsys.readouterr().out.startswith("tensor([[")


@pytest.mark.parametrize("script", SCRIPTS)
def test_docstrings_name_commands_of_their_own_script(script):
    commands = re.findall(r"^ {4}python (.+)$", importlib.import_module(script).__doc__, re.M)
    assert commands and all(command.startswith(f"{script}.py --") for command in commands)
