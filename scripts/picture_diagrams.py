# SPDX-License-Identifier: Apache-2.0
"""The two pictures of docs/how_it_works.md that are no simulations: the loop over iterations, and the processes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 1200
_STYLE = (
    "text{font-size:14px;fill:#1c2128}.title{font-size:16px;font-weight:600}.small{font-size:13px;fill:#4a5362}"
    ".box{stroke:#5b6472;stroke-width:1.2}.arrow{fill:none;stroke:#1c2128;stroke-width:1.6}"
    ".dashed{stroke-dasharray:6 4}.strong{stroke-width:3}.host{fill:none;stroke:#9aa3b0;stroke-dasharray:3 4}"
    ".lane{stroke:#dde1e7}"
)
_TRAINING, _SLOW, _OURS, _STORE, _PLAIN = "#cfe0f1", "#f7c9cf", "#fbe3b5", "#e6e9ee", "#ffffff"
_LINE_HEIGHT = 18


class Drawing:
    """Boxes, arrows and words on a white ground; x and y in units of the drawing, y downwards."""

    def __init__(self, height: int, label: str) -> None:
        self._height, self._label = height, label
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, lines: Sequence[str]) -> None:
        """A box with centred `lines`; the first is the heading if there are several."""
        self._parts.append(
            f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"/>'
        )
        top = y + height / 2 + 5 - _LINE_HEIGHT * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            look = ' class="small"' if number else ""
            self.text(x + width / 2, top + _LINE_HEIGHT * number, line, look + ' text-anchor="middle"')

    def host(self, x: float, y: float, width: float, height: float, name: str) -> None:
        """A dashed frame with its name at its top."""
        self._parts.append(f'<rect class="host" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>')
        self.text(x + 12, y + 22, name, ' class="title"')

    def text(self, x: float, y: float, words: str, attributes: str = "") -> None:
        """Words, from `x` on unless `attributes` say otherwise."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(words)}</text>')

    def arrow(self, points: Sequence[tuple[float, float]], look: str = "", *, both_ways: bool = False) -> None:
        """Straight lines through `points`, with a head at the end."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        start = ' marker-start="url(#head)"' if both_ways else ""
        self._parts.append(f'<path class="arrow {look}" d="M{path}"{start} marker-end="url(#head)"/>')

    def lane(self, y: float, name: Sequence[str]) -> None:
        """A row of the drawing, with its name at the left."""
        self._parts.append(f'<path class="lane" d="M0 {y:g}H{WIDTH}"/>')
        for number, line in enumerate(name):
            self.text(8, y + 28 + _LINE_HEIGHT * number, line, ' class="small"' if number else "")

    def svg(self) -> str:
        """The picture."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" font-family="sans-serif" '
            f'role="img" aria-label="{escape(self._label)}"><style>{_STYLE}</style><defs><marker id="head" '
            'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" '
            'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#1c2128"/></marker></defs>'
            f'<rect width="{WIDTH}" height="{self._height}" fill="#fff"/>{"".join(self._parts)}</svg>\n'
        )


def loop(*, healthy_s: float, slow_s: float, planned_s: float) -> str:
    """Four iterations around the moment when a link turns slow, their lengths to scale."""
    drawing = Drawing(452, "A link turns slow in iteration k; the plan for it runs in iteration k + 2")
    left, row = 190.0, 58
    scale = (WIDTH - left - 10) / (healthy_s + 2 * slow_s + 2 * planned_s)
    lanes = {"train": 44, "background": 148, "store": 236, "leader": 338}
    drawing.text(8, 24, "A link turns slow in iteration k: the plan for it runs in k + 2", ' class="title"')
    drawing.lane(lanes["train"] - 8, ["training threads", "of all ranks"])
    drawing.lane(lanes["background"] - 8, ["background threads", "of all ranks"])
    drawing.lane(lanes["store"] - 8, ["the job's store", "(torch.distributed)"])
    drawing.lane(lanes["leader"] - 8, ["background threads", "of the leader, rank 0"])
    iterations = [
        ("k - 1", healthy_s, _TRAINING, "stock's order"),
        ("k", slow_s, _SLOW, "the link is slow: timed as always"),
        ("k + 1", slow_s, _SLOW, "still the old order"),
        ("k + 2", planned_s, _TRAINING, "new order"),
        ("k + 3", planned_s, _TRAINING, "new order"),
    ]
    starts = [left]
    for name, seconds, fill, words in iterations:
        lines = [f"{name}: {1e3 * seconds:.0f} ms", words]
        drawing.box(starts[-1], lanes["train"], scale * seconds - 3, row, fill, lines)
        starts.append(starts[-1] + scale * seconds)
    end_of_k, start_of_k2 = starts[2], starts[3]
    under = lanes["train"] + row
    # What all ranks measured in k.
    drawing.box(end_of_k + 8, lanes["background"], 128, row, _OURS, ["hand in", "what k measured"])
    drawing.arrow([(end_of_k - 2, under), (end_of_k + 30, lanes["background"])])
    drawing.box(end_of_k + 20, lanes["store"], 104, row, _STORE, ["k, of", "every rank"])
    drawing.arrow([(end_of_k + 72, lanes["background"] + row), (end_of_k + 72, lanes["store"])])
    # What the leader makes of it.
    steps = ["detector", "findings"], ["paths", "choice"], ["planner", "order"]
    for number, lines in enumerate(steps):
        drawing.box(end_of_k + 20 + 88 * number, lanes["leader"], 80, row, _OURS, lines)
    drawing.arrow([(end_of_k + 60, lanes["store"] + row), (end_of_k + 60, lanes["leader"])])
    # And how it comes back.
    drawing.box(end_of_k + 176, lanes["store"], 106, row, _STORE, ["decision", "for k + 2"])
    drawing.arrow([(end_of_k + 236, lanes["leader"]), (end_of_k + 236, lanes["store"] + row)])
    drawing.arrow([(end_of_k + 236, lanes["store"]), (start_of_k2 + 6, under)])
    drawing.text(start_of_k2 + 18, lanes["background"] + 12, "every rank reads it", ' class="small"')
    drawing.text(start_of_k2 + 18, lanes["background"] + 30, "before k + 2 begins", ' class="small"')
    drawing.text(
        8,
        436,
        "The same in every iteration. A decision that is late takes effect later; nothing waits for it.",
        ' class="small"',
    )
    return drawing.svg()


def processes() -> str:
    """Two stages on two hosts, what runs there, and what goes between them."""
    drawing = Drawing(560, "Training processes, delegates, the two paths between them, and the store")
    store = ["the job's store (torch.distributed)", "addresses, the job's secret, decisions of the leader"]
    drawing.box(300, 12, 830, 56, _STORE, store)
    for x, name, stage, leads in ((10.0, "host A", 0, True), (720.0, "host B", 1, False)):
        drawing.host(x, 100, 470, 440, name)
        drawing.box(x + 20, 136, 430, 190, _PLAIN, [])
        drawing.text(x + 34, 160, f"training process: rank {stage}, stage {stage}", ' class="title"')
        drawing.box(x + 36, 174, 190, 60, _TRAINING, ["training thread", "F, I, W in planned order"])
        drawing.box(x + 244, 174, 190, 60, _OURS, ["background threads", "times, clocks, exchange"])
        if leads:
            drawing.box(x + 244, 248, 190, 60, _OURS, ["leader (rank 0 only)", "and its planner process"])
        drawing.box(x + 20, 456, 430, 66, _PLAIN, ["delegate process", "no torch, no GPU; replaced if it fails"])
        drawing.box(x + 36, 362, 398, 50, _STORE, ["rings in shared memory", "one each way, 16 slots of 512 KiB"])
        drawing.arrow([(x + 130, 234), (x + 130, 362)], both_ways=True)
        drawing.arrow([(x + 130, 412), (x + 130, 456)], both_ways=True)
    drawing.text(150, 346, "copy, and go on", ' class="small"')
    drawing.arrow([(354, 174), (354, 68)], "dashed", both_ways=True)
    drawing.arrow([(1064, 174), (1064, 68)], "dashed", both_ways=True)
    drawing.arrow([(460, 286), (740, 286)], "strong", both_ways=True)
    drawing.text(600, 274, "device path", ' class="title" text-anchor="middle"')
    drawing.text(600, 310, "NCCL, or gloo on CPUs:", ' class="small" text-anchor="middle"')
    drawing.text(600, 328, "on a stream, in its turn", ' class="small" text-anchor="middle"')
    drawing.arrow([(460, 489), (740, 489)], "strong", both_ways=True)
    drawing.text(600, 477, "host path", ' class="title" text-anchor="middle"')
    drawing.text(600, 513, "TCP, or RDMA over all RNICs;", ' class="small" text-anchor="middle"')
    drawing.text(600, 531, "within a host: rings are shared", ' class="small" text-anchor="middle"')
    return drawing.svg()
