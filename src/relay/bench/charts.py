"""The KV benchmark as plain SVG: exposed against total by length and transport, and one prompt's timeline layer by layer."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from relay.bench.kv import Timeline

COLOURS = {"compute": "#b9c4cf", "pack": "#2f7ed8", "wire": "#f28f43", "scatter": "#3a9d5d"}
BASELINE, EXPOSED, PREFILL = "#f28f43", "#2f7ed8", "#dfe4e8"
SHOWN_LAYERS = 30  # of the end of the prompt


class Drawing:
    """Shapes of one picture; y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = width, height
        self._shapes: list[str] = []
        self.text(16, 24, title, size=15)

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str, tip: str = "") -> None:
        shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.4):.2f}" height="{height:.2f}" fill="{colour}"'
        self._shapes.append(f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = "#999") -> None:
        self._shapes.append(f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{colour}"/>')

    def text(self, x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> None:
        self._shapes.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}" fill="#222">{escape(text)}</text>'
        )

    def render(self) -> str:
        width, height = self._size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        background = f'<rect width="{width}" height="{height}" fill="white"/>'
        return "\n".join([head, background, *self._shapes, "</svg>", ""])


def write_charts(folder: Path, rows: Sequence[dict[str, Any]], timelines: Sequence[Timeline]) -> list[Path]:
    """Write the pictures; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"kv-exposed.svg": exposed_chart(rows)}
    pictures |= {f"kv-timeline-{timeline.transport}.svg": timeline_chart(timeline) for timeline in timelines}
    for name, picture in pictures.items():
        (folder / name).write_text(picture)
    return [folder / name for name in pictures]


def exposed_chart(rows: Sequence[dict[str, Any]]) -> str:
    """For every row two bars: the transfer after prefill, and what of it is left exposed when it is streamed."""
    left, right, top, step = 210, 120, 62, 40
    width = 900
    scale = (width - left - right) / max(max(row["baseline_exposed_s"] for row in rows), 1e-9)
    drawing = Drawing(width, top + step * len(rows) + 20, "KV transfer the first token of D waits for")
    for x, colour, text in ((16, BASELINE, "sent after prefill"), (180, EXPOSED, "streamed during prefill: exposed")):
        drawing.rectangle(x, 36, 11, 11, colour)
        drawing.text(x + 16, 46, text)
    for index, row in enumerate(rows):
        y = top + index * step
        label = f"{row['tokens']} tokens, {row['transport']}, {row['kv_cache_dtype']}"
        drawing.text(left - 8, y + 17, label, anchor="end")
        drawing.text(left - 8, y + 30, f"{row['bytes'] / 1e6:.1f} MB", size=9, anchor="end")
        baseline, exposed = row["baseline_exposed_s"], row["exposed_s"]
        drawing.rectangle(left, y + 4, baseline * scale, 13, BASELINE)
        drawing.text(left + baseline * scale + 4, y + 14, f"{baseline * 1e3:.2f} ms")
        drawing.rectangle(left, y + 19, max(exposed, 0.0) * scale, 13, EXPOSED)
        share = (
            f"below noise ± {row['noise_s'] * 1e3:.2f} ms"
            if row["below_noise"]
            else f"{row['hidden_share']:.1%} hidden"
        )
        drawing.text(left + max(exposed, 0.0) * scale + 4, y + 29, f"{exposed * 1e3:.2f} ms ({share})")
    return drawing.render()


def timeline_chart(timeline: Timeline) -> str:
    """The end of one prompt: a line a layer, with its compute, pack, wire and scatter."""
    last = max(end for what, _, _, end in timeline.spans if what == "compute")
    computes = sorted((start, layer) for what, layer, start, _ in timeline.spans if what == "compute")
    begin = computes[max(0, len(computes) - SHOWN_LAYERS - 1)][0]
    end = max(end for _, _, _, end in timeline.spans)
    left, top, row_height, width = 70, 66, 13, 1000
    scale = (width - left - 20) / max(end - begin, 1e-9)
    shown = [span for span in timeline.spans if span[3] > begin]
    layers = sorted({layer for _, layer, _, _ in shown})
    line_of = {layer: index for index, layer in enumerate(layers)}
    bottom = top + row_height * len(layers)
    height = bottom + 104
    title = f"End of a prompt of {timeline.tokens} tokens over {timeline.transport}: {(end - begin) * 1e3:.1f} ms"
    drawing = Drawing(width, height, title)
    for index, (what, colour) in enumerate(COLOURS.items()):
        drawing.rectangle(16 + 110 * index, 36, 11, 11, colour)
        drawing.text(32 + 110 * index, 46, what)
    for layer in layers:
        name = (
            "last" if layer == layers[-1] and "compute" in {w for w, at, _, _ in shown if at == layer} else str(layer)
        )
        drawing.text(left - 8, top + line_of[layer] * row_height + 10, name, size=9, anchor="end")
    for what, layer, start, stop in shown:
        y = top + line_of[layer] * row_height
        x = left + (max(start, begin) - begin) * scale
        tip = f"{what} layer {layer}: {(stop - start) * 1e3:.3f} ms"
        drawing.rectangle(x, y + 1, (stop - max(start, begin)) * scale, row_height - 3, COLOURS[what], tip)
    x = left + (last - begin) * scale
    drawing.line(x, top - 6, x, bottom + 4)
    drawing.text(x - 4, top - 8, "last layer ends", size=9, anchor="end")
    drawing.text(16, top - 8, "layer", size=9)
    _axis(drawing, left, bottom + 4, scale, end - begin)
    _last_frame(drawing, timeline, left, bottom + 50, width - left - 240)
    return drawing.render()


def _axis(drawing: Drawing, left: float, y: float, scale: float, seconds: float) -> None:
    """Milliseconds, in steps of 1, 2 or 5 times a power of ten."""
    tick = 10.0 ** math.floor(math.log10(seconds))
    step = next(tick * part for part in (0.1, 0.2, 0.5, 1.0) if seconds / (tick * part) <= 10)
    drawing.line(left, y, left + seconds * scale, y)
    for index in range(int(seconds / step) + 1):
        x = left + index * step * scale
        drawing.line(x, y, x, y + 4)
        drawing.text(x, y + 15, f"{index * step * 1e3:g} ms", size=9, anchor="middle")


def _last_frame(drawing: Drawing, timeline: Timeline, left: float, y: float, width: float) -> None:
    """The frame that was packed last, enlarged: what there was to hide."""
    packed = max((start, index) for index, (what, _, start, _) in enumerate(timeline.spans) if what == "pack")[1]
    frame = timeline.spans[packed : packed + 3]  # pack, wire, scatter
    begin, end = frame[0][2], frame[-1][3]
    drawing.text(16, y, f"The last frame, of layer {frame[0][1]}, enlarged: {(end - begin) * 1e3:.3f} ms", size=11)
    for what, layer, start, stop in frame:
        x, span = left + (start - begin) / (end - begin) * width, (stop - start) / (end - begin) * width
        tip = f"{what} layer {layer}: {(stop - start) * 1e3:.3f} ms"
        drawing.rectangle(x, y + 10, span, 16, COLOURS[what], tip)
    times = ", ".join(f"{what} {(stop - start) * 1e3:.3f}" for what, _, start, stop in frame)
    drawing.text(left + width + 8, y + 22, f"{times} ms", size=9)
