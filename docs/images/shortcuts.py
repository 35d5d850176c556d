"""Draws shortcuts.svg: a plain residual network of four units, and the same with learned shortcuts.

python docs/images/shortcuts.py
"""

from __future__ import annotations

from pathlib import Path

UNITS = 4
STEP, LEFT = 170, 60  # between states; of the first one
STYLE = """
  .page { fill: #fff } .title { fill: #1a237e; font-weight: 600 } .text { fill: #444 } .state { fill: #5c6bc0 }
  .unit { fill: #e8eaf6; stroke: #5c6bc0 } .plain, .branch { fill: none; stroke: #888; stroke-width: 1.6 }
  .learned { fill: none; stroke: #c62828 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #262a36 } .title { fill: #c5cae9 } .text { fill: #ddd } .state { fill: #8c9eff }
    .unit { fill: #333a55; stroke: #8c9eff } .plain, .branch { stroke: #aaa } .learned { stroke: #ef9a9a }
  }
"""


def row(y: int, title: str, formula: str, learned: bool) -> str:
    """One network from left to right: states as dots, branches below, shortcuts on the line or above it."""
    ends = [LEFT + STEP * t for t in range(UNITS + 1)]
    parts = [
        f'<text class="title" x="{LEFT - 32}" y="{y - 118 + 54 * (not learned)}">{title}</text>',
        f'<text class="text" x="{ends[-1] + 32}" y="{y - 118 + 54 * (not learned)}" text-anchor="end">{formula}</text>',
    ]
    for t in range(1, UNITS + 1):
        a, b = ends[t - 1], ends[t]
        middle = (a + b) // 2
        parts += [
            f'<path class="branch" d="M{a} {y}V{y + 46}H{b}V{y}"/>',
            f'<rect class="unit" x="{middle - 34}" y="{y + 32}" width="68" height="28" rx="5"/>',
            f'<text class="text" x="{middle}" y="{y + 51}" text-anchor="middle">unit {t}</text>',
        ]
        if not learned:
            parts.append(f'<path class="plain" d="M{a} {y}H{b}"/>')
            continue
        for i in range(t):
            height = 30 * (t - i) ** 0.8
            width = 2.6 - 0.55 * (t - i)
            arc = f'd="M{ends[i]} {y}C{ends[i] + 20} {y - height:.0f} {b - 20} {y - height:.0f} {b} {y}"'
            parts.append(f'<path class="learned" stroke-width="{width:.2f}" {arc}/>')
    for t, x in enumerate(ends):
        parts.append(f'<circle class="state" cx="{x}" cy="{y}" r="6"/>')
        parts.append(f'<text class="text" x="{x}" y="{y + 82}" text-anchor="middle">x{subscript(t)}</text>')
    return "".join(parts)


def subscript(text: int | str) -> str:
    return f'<tspan dy="4" font-size="11">{text}</tspan>'


def main() -> None:
    width, height = 2 * LEFT + STEP * UNITS, 440
    back = '<tspan dy="-4">'
    plain = f"x{subscript('t')}{back} = x{subscript('t-1')}{back} + unit</tspan></tspan>"
    mixed = f"Σ w{subscript('ti')}{back} x{subscript('i')}{back} + unit</tspan></tspan>"
    learned = f"x{subscript('t')}{back} = {mixed}</tspan>"
    above = row(104, "Plain: each state is the one before it, and what a unit adds", plain, False)
    below = row(342, "Learned: a weighted sum of all states before it", learned, True)
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        f'font-size="15" role="img" aria-labelledby="title"><title id="title">Plain and learned shortcuts</title>'
        f'<style>{STYLE}</style><rect class="page" width="{width}" height="{height}" rx="8"/>{above}{below}</svg>\n'
    )
    Path(__file__).with_suffix(".svg").write_text(text)


if __name__ == "__main__":
    main()
