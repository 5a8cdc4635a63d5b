"""Small charts as SVG, or as PNG with Pillow: bars and curves, a few kilobytes each.

A chart is a list of rectangles, lines and texts, which both formats draw. Texts are escaped.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 200  # pixels of a chart
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 28, 36  # margins
FONT_SIZE = 11
INK, SOFT, GRID = "#333333", "#777777", "#dddddd"
COLOURS = ("#3b6fb6", "#d98032", "#4f9d69", "#b5485d", "#7d63a8", "#8a8a8a")
MAX_LABELS = 8


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text; `anchor` is start, middle or end, `y` its baseline."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = INK
    is_bold: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """What to draw, in order."""

    title: str
    shapes: tuple[Rectangle | Curve | Text, ...]
    width: int = WIDTH
    height: int = HEIGHT


def bar_chart(title: str, bars: Sequence[tuple[str, float]], x_label: str = "") -> Chart:
    """Upright bars, each with its label; some labels are left out where there are many."""
    top = max((value for _, value in bars), default=0)
    shapes = _frame(title, top, x_label)
    step = (WIDTH - LEFT - RIGHT) / max(len(bars), 1)
    every = -(-len(bars) // MAX_LABELS) or 1
    for place, (label, value) in enumerate(bars):
        height = _height(value, top)
        x = LEFT + place * step
        shapes.append(
            Rectangle(x + step * 0.1, HEIGHT - BOTTOM - height, step * 0.8, height, COLOURS[0])
        )
        if place % every == 0:
            shapes.append(
                Text(x + step / 2, HEIGHT - BOTTOM + 14, label, "middle", SOFT),
            )
    return Chart(title, tuple(shapes))


def curve_chart(title: str, points: Sequence[tuple[float, float]], x_label: str = "") -> Chart:
    """A curve through points whose x rises from 0."""
    top = max((y for _, y in points), default=0)
    end = max((x for x, _ in points), default=0)
    shapes = _frame(title, top, x_label)
    width = WIDTH - LEFT - RIGHT
    places = tuple(
        (LEFT + (x / end if end else 0) * width, HEIGHT - BOTTOM - _height(y, top))
        for x, y in points
    )
    if len(places) > 1:
        shapes.append(Curve(places, COLOURS[0]))
    for share in (0, 0.5, 1):
        x = LEFT + share * width
        anchor = ("start", "middle", "end")[int(share * 2)]
        shapes.append(Text(x, HEIGHT - BOTTOM + 14, format_number(share * end), anchor, SOFT))
    return Chart(title, tuple(shapes))


def share_chart(title: str, shares: Sequence[tuple[str, float]]) -> Chart:
    """One lying bar, cut into shares, with a legend of name and number."""
    total = sum(value for _, value in shares)
    shapes: list[Rectangle | Curve | Text] = [Text(8, 18, title, is_bold=True)]
    x = 8.0
    for place, (name, value) in enumerate(shares):
        colour = COLOURS[min(place, len(COLOURS) - 1)]
        width = (WIDTH - 16) * value / total if total else 0
        shapes.append(Rectangle(x, 28, width, 18, colour))
        x += width
        column, row = place % 3, place // 3
        left, y = 8 + column * 155, 64 + row * 18
        shapes += [
            Rectangle(left, y - 9, 10, 10, colour),
            Text(left + 15, y, f"{name}: {format_number(value)}"),
        ]
    return Chart(title, tuple(shapes), height=64 + 18 * (-(-len(shares) // 3)))


def stack(title: str, charts: Sequence[Chart]) -> Chart:
    """Charts below one another."""
    shapes: list[Rectangle | Curve | Text] = []
    y = 0
    for chart in charts:
        shapes += [_moved(shape, y) for shape in chart.shapes]
        y += chart.height + 8
    return Chart(title, tuple(shapes), height=max(y, 1))


def to_svg(chart: Chart) -> str:
    """The chart as an SVG element, which can stand in HTML or in a file."""
    size = f'width="{chart.width}" height="{chart.height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {chart.width} {chart.height}" role="img" '
        f'font-family="sans-serif" font-size="{FONT_SIZE}">'
        f"<title>{escape(chart.title)}</title>"
        f'<rect width="100%" height="100%" fill="white"/>'
    )
    return head + "".join(map(_svg_shape, chart.shapes)) + "</svg>"


def to_data_uri(chart: Chart) -> str:
    """The chart as an image that can stand in Markdown."""
    data = base64.b64encode(to_svg(chart).encode()).decode()
    return f"data:image/svg+xml;base64,{data}"


def to_png(chart: Chart, scale: int = 2) -> bytes:
    """The chart as a PNG file, `scale` times as large.

    Raises
    ------
    RuntimeError
        If Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise RuntimeError(
            "a PNG needs Pillow, which is not installed; pip install pillow, or name a .svg file"
        ) from None
    image = Image.new("RGB", (chart.width * scale, chart.height * scale), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT_SIZE * scale)
    for shape in chart.shapes:
        if isinstance(shape, Rectangle):
            corner = (shape.x + shape.width, shape.y + shape.height)
            box = [value * scale for value in (shape.x, shape.y, *corner)]
            draw.rectangle(box, fill=shape.colour)
        elif isinstance(shape, Curve):
            points = [(x * scale, y * scale) for x, y in shape.points]
            draw.line(points, fill=shape.colour, width=scale * 3 // 2)
        else:
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
            place = (shape.x * scale, shape.y * scale)
            draw.text(place, shape.text, fill=shape.colour, font=font, anchor=anchor)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def format_number(value: float) -> str:
    """A number in few characters: 1,234, 56.7k, 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.3g}{letter}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def _frame(title: str, top: float, x_label: str) -> list[Rectangle | Curve | Text]:
    """Title, lines at nothing, half and the top, and the label of the x axis."""
    shapes: list[Rectangle | Curve | Text] = [Text(8, 18, title, is_bold=True)]
    for share in (0, 0.5, 1):
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        shapes.append(Rectangle(LEFT, y, WIDTH - LEFT - RIGHT, 1, GRID))
        shapes.append(Text(LEFT - 6, y + 4, format_number(share * top), "end", SOFT))
    shapes.append(Text(WIDTH - RIGHT, HEIGHT - 6, x_label, "end", SOFT))
    return shapes


def _height(value: float, top: float) -> float:
    return value / top * (HEIGHT - TOP - BOTTOM) if top else 0.0


def _moved(shape: Rectangle | Curve | Text, down: float) -> Rectangle | Curve | Text:
    if isinstance(shape, Rectangle):
        return Rectangle(shape.x, shape.y + down, shape.width, shape.height, shape.colour)
    if isinstance(shape, Curve):
        return Curve(tuple((x, y + down) for x, y in shape.points), shape.colour)
    return Text(
        shape.x, shape.y + down, shape.text, shape.anchor, shape.colour, is_bold=shape.is_bold
    )


def _svg_shape(shape: Rectangle | Curve | Text) -> str:
    if isinstance(shape, Rectangle):
        return (
            f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" '
            f'height="{shape.height:.1f}" fill="{shape.colour}"/>'
        )
    if isinstance(shape, Curve):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        return (
            f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="1.5"/>'
        )
    weight = ' font-weight="bold"' if shape.is_bold else ""
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" '
        f'fill="{shape.colour}"{weight}>{escape(shape.text)}</text>'
    )
