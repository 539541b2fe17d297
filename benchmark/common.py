"""What the tools of this folder share. (The scripts share nothing: each is whole.)"""

import json
import sys

# Arguments that may change when a run goes on: they do not make it another run.
FREE = ("total_timesteps", "run_dir", "save_every", "resume", "cuda", "track", "wandb_project", "capture_video")


def fail(message):
    """One sentence on stderr and exit code 2: a user who is wrong never sees a traceback."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def table(header, rows):
    """Markdown."""
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in [header, ["---"] * len(header), *rows])


def fill(page, name, text):
    """Puts text between the page's lines `<!-- name -->` and `<!-- end -->`."""
    opening, closing = f"<!-- {name} -->\n", "<!-- end -->\n"
    before, rest = page.read_text().split(opening)
    page.write_text(before + opening + text + rest[rest.index(closing) :])


def load_jobs(path):
    """Finished jobs, a line of JSON each; a line that an interruption cut short is taken out of the file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]))
    return [json.loads(line) for line in lines if line.endswith("\n")]
