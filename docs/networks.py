"""Draws docs/figures/networks.svg: the networks of BDPG, and which line of Algorithm 1 trains which of them.

python docs/networks.py
"""

from pathlib import Path

FIGURE = Path(__file__).parent / "figures" / "networks.svg"
# The colours of lines 17 to 20 are Okabe and Ito's, which colour-blind readers can tell apart. There is a panel because
# some browsers take the system's theme for an image, not the page's.
STYLE = """
text { font: 20px Helvetica, Arial, sans-serif; fill: #1f2328; text-anchor: middle }
.start { text-anchor: start } .name { font-weight: bold }
.math { font: italic 23px "Times New Roman", "DejaVu Serif", serif }
.number { font-size: 18px; font-weight: bold; fill: #000 } .c18 + .number { fill: #fff }
.panel { fill: #fff; stroke: #d1d9e0 } .solid { fill: currentColor }
.box, .data, .trains { fill: none; stroke: currentColor; stroke-width: 2.5 } .box { fill: #f6f8fa }
.trains, .box:not(.c0) { stroke-width: 4 } .trains { stroke-dasharray: 9 6 }
.c0 { color: #59636e } .c17 { color: #d55e00 } .c18 { color: #0072b2 } .c19 { color: #009e73 } .c20 { color: #cc79a7 }
@media (prefers-color-scheme: dark) {
  text:not(.number) { fill: #f0f6fc } .c18 + .number { fill: #000 }
  .panel { fill: #0d1117; stroke: #3d444d } .box { fill: #212830 } .c0 { color: #b7bfc8 } .c18 { color: #56b4e9 }
}
"""
DESCRIPTION = """
Data: the policy's rewards and a return g of the generator make the Bellman target x (lines 10-11). The encoder infers
the latent behind x. The discriminator tells generated pairs of return and latent from inferred ones. The encoder's
distributions at x and at g differ by the information gain (Eq. 13), a reward of the policy. Training: line 17 (Eq. 11,
max) moves the discriminator, line 18 (Eq. 11, min) encoder and prior, line 19 (Eq. 12) the generator and the state
embedding c(s), line 20 (PPO) the policy and, on Atari, c(s).
"""


def text(x, y, content, style="start"):
    return f'<text x="{x}" y="{y}" class="{style}">{content}</text>'


def badge(x, y, line):
    return f'<circle cx="{x}" cy="{y}" r="16" class="solid c{line}"/>' + text(x, y + 6, line, "number")


def box(x, y, line, *rows, width=180, height=84):
    """Around (x, y), in the colour of the line that trains it; the rows are a name, a symbol and a note."""
    corner = f'x="{x - width // 2}" y="{y - height // 2}" width="{width}" height="{height}" rx="12"'
    first = y + 20 - 13 * len(rows)
    rows = [text(x, first + 27 * i, *row) for i, row in enumerate(zip(rows, ("name", "math", "note"), strict=False))]
    return f'<rect {corner} class="box c{line}"/>' + "".join(rows)


def arrow(*points, line=None):
    """Along horizontal and vertical segments: solid for data, or dashed in the colour of the line that trains."""
    path = "M{} {}".format(*points[0])
    for before, (x, y), after in zip(points, points[1:], points[2:], strict=False):  # round corners
        (x0, y0), (x1, y1) = ((x + 12 * sign(a - x), y + 12 * sign(b - y)) for a, b in (before, after))
        path += f"L{x0} {y0}Q{x} {y} {x1} {y1}"
    (x0, y0), (x, y) = points[-2:]
    dx, dy = sign(x - x0), sign(y - y0)
    x1, y1 = x - 14 * dx, y - 14 * dy
    tip = f"M{x} {y}L{x1 + 8 * dy} {y1 + 8 * dx}L{x1 - 8 * dy} {y1 - 8 * dx}Z"
    style = "data c0" if line is None else f"trains c{line}"
    return f'<path d="{path}L{x1} {y1}" class="{style}"/><path d="{tip}" class="solid c{line or 0}"/>'


def sign(number):
    return (number > 0) - (number < 0)


def draw():
    left, middle, right, top, centre, bottom = 104, 420, 696, 60, 216, 366  # the centres of the networks
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 530" role="img" aria-labelledby="title desc">',
        f'<title id="title">The five networks of BDPG and what trains them</title><desc id="desc">{DESCRIPTION}</desc>',
        f"<style>{STYLE}</style>",
        '<rect x="1" y="1" width="798" height="528" rx="14" class="panel"/>',
        # legend
        arrow((20, 30), (64, 30)) + text(76, 37, "data"),
        arrow((175, 30), (223, 30), line=0) + text(234, 37, "trains"),
        badge(35, 64, 17) + text(58, 71, "max Eq. 11") + badge(190, 64, 18) + text(213, 71, "min Eq. 11"),
        badge(35, 102, 19) + text(58, 109, "min Eq. 12") + badge(190, 102, 20) + text(213, 109, "PPO"),
        text(20, 140, "(lines of Algorithm 1)"),
        # returns and latents
        arrow((middle, top + 42), (middle, centre - 42)) + text(middle + 18, 144, "z", "math"),
        arrow((middle, bottom - 42), (middle, centre + 42)) + text(middle + 18, 299, "z̃", "math"),
        arrow((middle - 92, centre - 26), (left + 92, centre - 26)) + text(262, centre - 35, "g", "math"),
        arrow((44, bottom - 42), (44, centre + 46)) + text(96, 302, "rewards", "note"),
        arrow((left + 92, centre + 30), (228, centre + 30), (228, bottom - 18), (middle - 92, bottom - 18)),
        text(270, bottom - 29, "x, g", "math"),
        # pairs
        arrow((middle + 92, top + 16), (right - 26, top + 16), (right - 26, centre - 42)),
        f'<path d="M{middle + 92} {centre}h8q12 0 12 -12V{top + 16}" class="data c0"/>',
        f'<circle cx="{middle + 112}" cy="{top + 16}" r="5" class="solid c0"/>',
        text(601, 108, "generated", "note") + text(601, 136, "(x̃, z)", "math"),
        arrow((middle + 92, bottom - 16), (right - 26, bottom - 16), (right - 26, centre + 42)),
        text(601, 304, "inferred", "note") + text(601, 332, "(x, z̃)", "math"),
        # information gain
        arrow((middle - 92, bottom + 16), (left + 92, bottom + 16)),
        text(262, bottom + 40, "information", "note") + text(262, bottom + 63, "gain, Eq. 13", "note"),
        # training
        arrow((left + 92, centre + 4), (middle - 92, centre + 4), line=19) + badge(262, centre + 4, 19),
        arrow((160, centre + 42), (160, bottom - 42), line=20) + badge(160, 288, 20),
        arrow((right + 36, centre - 42), (right + 36, top - 14), (middle + 92, top - 14), line=18),
        arrow((right + 36, centre + 42), (right + 36, bottom + 14), (middle + 92, bottom + 14), line=18),
        badge(right + 36, 115, 18) + badge(right + 36, 307, 18),
        arrow((604, centre - 25), (566, centre - 25), (566, centre + 25), (604, centre + 25), line=17),
        badge(566, centre, 17),
        # networks
        box(middle, top, 18, "prior", "p(z|s)"),
        box(middle, centre, 19, "generator", "G(z, s)"),
        box(middle, bottom, 18, "encoder", "q(z|x, s)"),
        box(right, centre, 17, "discriminator", "D(x, z, s)"),
        box(left, centre - 8, 0, "Bellman target", "x = Â + g", "lines 10–11", height=100),
        box(left, bottom, 20, "policy", "π(a|s)"),
        # trunk
        box(400, 483, 0, width=776, height=70),
        text(28, 476, "state embedding c(s)", "name start") + text(28, 505, "input of p, q, G, D; on Atari also of π"),
        text(424, 476, "trained by") + badge(542, 470, 19) + text(567, 476, "and, on Atari,") + badge(720, 470, 20),
        text(424, 505, "no gradient from p, q, D"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    FIGURE.write_text(draw(), encoding="utf-8")
