"""The documentation says what is there: commands, line references, logged metrics, arguments."""

import re
from pathlib import Path

import pytest
from conftest import SCRIPTS, read_scalars

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_ci_runs_the_readmes_test_command():
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    command = next(block.strip() for block in blocks if "pytest" in block)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_line_references_point_at_the_quoted_code(page):
    for code, line, file, anchor in re.findall(
        r"`([^`]+)` \(\[line (\d+)\]\(\.\./(\w+\.py)#L(\d+)\)\)", page.read_text()
    ):
        assert line == anchor
        lines = (ROOT / file).read_text().splitlines()
        assert code in "".join(lines[int(line) - 1 : int(line)]), (
            f"{page.name}: {code!r} is not on line {line} of {file}"
        )


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
            assert not anchor or file.suffix != ".md" or anchor in anchors(file), (
                f"{page.name} links to {target}#{anchor}"
            )


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
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "evaluate.md").read_text(), re.S)
    names = {}
    exec(code.replace("runs/NAME", str(trained["bdpg_mujoco"])), names)
    assert names["returns"].shape == (1000, 2) and names["returns"].std() > 0
    low, middle, high = names["returns"].quantile(names["torch"].tensor([0.1, 0.5, 0.9]), 0)
    assert (low < middle).all() and (middle < high).all()
    assert capsys.readouterr().out.startswith("tensor([[")
