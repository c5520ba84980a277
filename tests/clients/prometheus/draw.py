"""Draws a dashboard as SVG, from the answers of a Prometheus.

It draws what the dashboards use: timeseries (with stacks and thresholds), heatmap and stat. The
places and the sizes of the panels are those of Grafana, and so are the colours, about.
"""

import html
import json
import math
import re
import time
import urllib.parse
import urllib.request

CELL_WIDTH, CELL_HEIGHT, GAP = 50, 32, 8
COLOURS = "#73bf69 #f2cc0c #8ab8ff #ff780a #f2495c #5794f2 #b877d9 #e0b400 #37872d #fa6400".split()
UNITS = {"reqps": " req/s", "ops": " /s"}
STYLE = """
text { font: 11px sans-serif; fill: #a5a6ab }
.title { font-weight: bold; fill: #d8d9da; font-size: 13px }
.heading { font-weight: bold; fill: #ffffff; font-size: 18px }
.value { fill: #d8d9da; font-size: 15px }
.figure { fill: #8ab8ff; font-size: 30px }
.panel { fill: #181b1f; stroke: #2c3235 }
.grid { stroke: #2a2d33 }
.limit { stroke: #f2495c; stroke-dasharray: 6 4; stroke-width: 1.5 }
path.line { fill: none; stroke-width: 1.5 }
.time { text-anchor: middle } .axis { text-anchor: end }
"""


def draw(dashboard, prometheus, variables, start, end):
    """Returns the SVG of one dashboard between two times."""
    panels = dashboard["panels"]
    height = 40 + CELL_HEIGHT * max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    width = 24 * CELL_WIDTH + GAP
    title = html.escape(dashboard["title"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{title}</title><style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#111217"/>',
        f'<text class="heading" x="{GAP}" y="27">{title}</text>',
    ]
    for panel in panels:
        grid = panel["gridPos"]
        x, y = GAP + grid["x"] * CELL_WIDTH, 40 + grid["y"] * CELL_HEIGHT
        w, h = grid["w"] * CELL_WIDTH - GAP, grid["h"] * CELL_HEIGHT - GAP
        name = html.escape(panel["title"])
        parts.append(f'<g transform="translate({x} {y})">')
        if panel["type"] == "row":
            parts.append(f'<text class="title" x="4" y="18">▾ {name}</text></g>')
            continue
        parts.append(f'<rect class="panel" width="{w}" height="{h}" rx="2"/>')
        parts.append(f'<text class="title" x="10" y="20">{name}</text>')
        series = read(panel, prometheus, variables, start, end)
        kind = {"timeseries": timeseries, "heatmap": heatmap, "stat": stat}[panel["type"]]
        parts += kind(panel, series, w, h, start, end)
        parts.append("</g>")
    return "\n".join(parts) + "\n</svg>\n"


def read(panel, prometheus, variables, start, end):
    """Returns the name, the labels and the points of each series of a panel."""
    series = []
    for target in panel["targets"]:
        promql = target["expr"]
        for name, value in variables.items():
            promql = promql.replace(name, value)
        step = max(1, (end - start) / 90)
        query = {"query": promql, "start": start, "end": end, "step": step}
        url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(query)}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
        for row in result:
            labels = row["metric"]
            legend = target.get("legendFormat", "")
            name = re.sub(r"{{(\w+)}}", lambda m: labels.get(m[1], ""), legend).strip()
            points = [(at, float(value)) for at, value in row["values"]]
            series.append((name, labels, [point for point in points if math.isfinite(point[1])]))
    return sorted(series, key=lambda one: len(one[2]) == 0)


def unit_text(value, unit):
    if unit == "s":
        for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if abs(value) * factor >= 1 or value == 0:
                break
        return f"{value * factor:.3g} {name}" if value < 1000 else f"{value:.0f} s"
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    sizes = [(2**40, " TiB"), (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB")]
    if unit != "bytes":
        sizes = [(1e6, " M"), (1e4, " K")]
    for size, name in sizes:
        if abs(value) >= size:
            return f"{value / (size if name != ' K' else 1e3):.3g}{name}{UNITS.get(unit, '')}"
    text = f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return text + (" B" if unit == "bytes" else UNITS.get(unit, ""))


def nice_step(top, base):
    """Returns the distance of about four lines of the grid, a round number."""
    rough = top / 4
    scale = base ** math.floor(math.log(rough, base))
    rounds = (1, 2, 5, 10) if base == 10 else (1, 4, 16, 64, 256, 1024)
    return next(r * scale for r in rounds if r * scale >= rough * 0.999)


def legend_rows(names, w):
    """Places the entries of a legend in rows. Returns (row, x, name) of each."""
    places, row, x = [], 0, 14
    for name in names:
        length = 26 + 6.2 * len(name)
        if x + length > w and x > 14:
            row, x = row + 1, 14
        places.append((row, x, name))
        x += length
    return places


def time_axis(left, top, w, h, start, end):
    parts = []
    for i in range(5):
        at = start + (end - start) * (i + 0.5) / 5
        x = left + w * (i + 0.5) / 5
        label = time.strftime("%H:%M:%S", time.gmtime(at))
        parts.append(f'<path class="grid" d="M{x:.0f} {top}v{h:.0f}"/>')
        parts.append(f'<text class="time" x="{x:.0f}" y="{top + h + 15:.0f}">{label}</text>')
    return parts


def timeseries(panel, series, w, h, start, end):
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    opacity = defaults["custom"]["fillOpacity"] / 100
    steps = defaults.get("thresholds", {}).get("steps", [])
    limits = [step["value"] for step in steps if step["value"] is not None]
    styles = [override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]]
    dashed = [name for name, _, _ in series if any(re.search(s.strip("/"), name) for s in styles)]
    if stacked:
        below, stack = {}, []
        for name, labels, points in series:
            points = [(at, value + below.get(at, 0)) for at, value in points]
            below.update(points)
            stack.append((name, labels, points))
        series = stack
    names = [one[0] for one in series]
    legend = legend_rows(names, w)
    left, top = 70, 34
    rows = 1 + max((row for row, _, _ in legend), default=0)
    width, height = w - left - 14, h - top - 26 - 16 * rows
    highest = max((value for _, _, points in series for _, value in points), default=0)
    soft = defaults["custom"].get("axisSoftMax", 0)
    # Grafana draws a threshold only where the values reach. A little more room shows it here.
    highest = max([highest or soft or 1] + [limit for limit in limits if limit < highest * 4])
    top_value = defaults.get("max") or max(highest * 1.05, soft)
    step = nice_step(top_value, 2 if unit == "bytes" else 10)

    def x_of(at):
        return left + width * (at - start) / (end - start)

    def y_of(value):
        return top + height * (1 - min(value, top_value) / top_value)

    parts = time_axis(left, top, width, height, start, end)
    for i in range(int(top_value / step * 1.001) + 1):
        y = y_of(i * step)
        parts.append(f'<path class="grid" d="M{left} {y:.0f}h{width}"/>')
        label = unit_text(i * step, unit)
        parts.append(f'<text class="axis" x="{left - 6}" y="{y + 4:.0f}">{label}</text>')
    for i, (name, _, points) in reversed(list(enumerate(series))):
        colour = COLOURS[i % len(COLOURS)]
        for piece in pieces(points, (end - start) / 90 * 1.5):
            path = "L".join(f"{x_of(at):.0f} {y_of(value):.1f}" for at, value in bends(piece))
            if name in dashed:
                dashes = 'stroke-dasharray="8 8"'
                parts.append(f'<path class="line" stroke="{colour}" {dashes} d="M{path}"/>')
                continue
            first, last = x_of(piece[0][0]), x_of(piece[-1][0])
            floor = top + height
            area = f"M{path}L{last:.0f} {floor:.0f}L{first:.0f} {floor:.0f}Z"
            parts.append(f'<path fill="{colour}" fill-opacity="{opacity}" d="{area}"/>')
            parts.append(f'<path class="line" stroke="{colour}" d="M{path}"/>')
    for limit in (limit for limit in limits if limit <= top_value):
        parts.append(f'<path class="limit" d="M{left} {y_of(limit):.0f}h{width}"/>')
    for i, (row, x, name) in enumerate(legend):
        y = h - 16 * (rows - row) + 4
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{y - 5}" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{html.escape(name)}</text>')
    return parts if names else parts + [nothing(w, h)]


def pieces(points, longest):
    """Cuts a line where points are missing."""
    result = []
    for point in points:
        if not result or point[0] - result[-1][-1][0] > longest:
            result.append([])
        result[-1].append(point)
    return result


def bends(points):
    """Drops the points inside a level piece of a line. The file becomes smaller."""
    last = len(points) - 1
    for i, (at, value) in enumerate(points):
        if i in (0, last) or not points[i - 1][1] == value == points[i + 1][1]:
            yield at, value


def heatmap(panel, series, w, h, start, end):
    unit = panel["options"]["yAxis"]["unit"]
    buckets = sorted((float(labels["le"]), dict(points)) for _, labels, points in series)
    cells, below, floor = [], {}, 0
    for bound, points in buckets:
        cells.append((floor, bound, {at: n - below.get(at, 0) for at, n in points.items()}))
        below, floor = points, bound
    used = [i for i, cell in enumerate(cells) if any(n > 0.01 for n in cell[2].values())]
    if not used:
        return [nothing(w, h)]
    cells = cells[max(0, used[0] - 1) : used[-1] + 2]
    most = max(max(cell[2].values(), default=0) for cell in cells)
    left, top = 70, 34
    width, height = w - left - 14, h - top - 30
    row, column = height / len(cells), width / 90
    parts = time_axis(left, top, width, height, start, end)
    for i, (_, bound, counts) in enumerate(cells):
        y = top + height - row * (i + 1)
        if math.isfinite(bound) and i % math.ceil(16 / row) == 0:
            label = unit_text(bound, unit)
            parts.append(f'<text class="axis" x="{left - 6}" y="{y + 4:.0f}">{label}</text>')
        for at, count in counts.items():
            if count > 0.01:
                x = left + width * (at - start) / (end - start) - column / 2
                shade = 0.15 + 0.85 * math.sqrt(count / most)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{column - 0.5:.1f}" '
                    f'height="{row - 0.5:.1f}" fill="#ff9830" fill-opacity="{shade:.2f}"/>'
                )
    return parts


def stat(panel, series, w, h, start, end):
    if panel["options"]["textMode"] == "name":
        names = html.escape(", ".join(name for name, _, _ in series))
        return [f'<text class="value" x="10" y="{h / 2 + 20:.0f}">{names}</text>']
    points = [point for _, _, points in series for point in points]
    if not points:
        return [nothing(w, h)]
    top = max(max(value for _, value in points), 1e-9)
    places = [
        f"{w * (at - start) / (end - start):.0f} {h - 34 * value / top:.1f}"
        for at, value in bends(points)
    ]
    first, last = places[0].split()[0], places[-1].split()[0]
    area = f"M{'L'.join(places)}L{last} {h}L{first} {h}Z"
    value = unit_text(points[-1][1], panel["fieldConfig"]["defaults"]["unit"])
    return [
        f'<path fill="{COLOURS[2]}" fill-opacity="0.25" d="{area}"/>',
        f'<text class="figure" x="10" y="{h / 2 + 18:.0f}">{value}</text>',
    ]


def nothing(w, h):
    return f'<text class="time" x="{w / 2:.0f}" y="{h / 2:.0f}">No data</text>'
