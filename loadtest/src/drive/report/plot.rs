//! Plots as SVG. Their colours come from the page's style sheet, so they follow light and dark.
//!
//! Plotting crates write colours into the picture, which then has one background only.

use std::fmt::Write as _;

/// The size of a plot and of its margins, in user units.
const WIDE: Frame = Frame {
    width: 1040.0,
    height: 190.0,
};
const NARROW: Frame = Frame {
    width: 330.0,
    height: 200.0,
};
const LEFT: f64 = 44.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 18.0;
const BOTTOM: f64 = 24.0;
/// The width that a number of the horizontal axis needs.
const TICK: f64 = 110.0;

struct Frame {
    width: f64,
    height: f64,
}

/// A plot of the page.
#[derive(serde::Serialize)]
pub(super) struct PagePlot {
    /// The line above the plot.
    pub(super) title: String,
    /// The plot.
    pub(super) svg: String,
    /// The same for a narrow screen, if the plot has a row of its own.
    pub(super) narrow: Option<String>,
}

/// The bars of a distribution, and the quantiles that the plot marks. All are in seconds.
pub(super) struct Distribution {
    /// The lower end of the first bar. Each bar ends at `factor` times its lower end.
    pub(super) from: f64,
    /// The upper end of a bar over its lower end.
    pub(super) factor: f64,
    /// The number of values in each bar.
    pub(super) counts: Vec<u64>,
    /// The median.
    pub(super) p50: f64,
    /// The 99th percentile.
    pub(super) p99: f64,
}

/// A point of a curve with a label.
pub(super) struct LabelledPoint {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) label: String,
}

/// Plots one value over time. `values` are means of equal parts of the time from `from` to `to`.
pub(super) fn over_time(title: &str, values: &[f64], from: f64, to: f64) -> PagePlot {
    let draw = |frame| draw_over_time(frame, values, from, to);
    PagePlot {
        title: title.to_owned(),
        svg: draw(&WIDE),
        narrow: Some(draw(&NARROW)),
    }
}

fn draw_over_time(frame: &'static Frame, values: &[f64], from: f64, to: f64) -> String {
    let max = values.iter().copied().fold(0.0, f64::max);
    let axes = Axes::new(frame, (from, to), max);
    let mut svg = axes.start(" s");
    let step = (to - from) / values.len().max(1) as f64;
    let points: Vec<String> = (0..)
        .zip(values)
        .map(|(index, value)| {
            let x = axes.x(from + step * (f64::from(index) + 0.5));
            format!("{x:.1},{:.1}", axes.y(*value))
        })
        .collect();
    let (left, right) = (axes.x(from + step / 2.0), axes.x(to - step / 2.0));
    let (line, floor) = (points.join(" "), axes.y(0.0));
    let _ = write!(
        svg,
        "<polygon class=\"area\" points=\"{left:.1},{floor:.1} {line} {right:.1},{floor:.1}\"/>\
         <polyline class=\"curve\" points=\"{line}\"/></svg>"
    );
    svg
}

/// Plots a distribution over a logarithmic axis of milliseconds.
pub(super) fn distribution(title: &str, bars: &Distribution) -> PagePlot {
    let end = bars.from * bars.factor.powi(bars.counts.len() as i32);
    let max = bars.counts.iter().copied().max().unwrap_or(0) as f64;
    let axes = Axes::new(&NARROW, (bars.from.ln(), end.ln()), max);
    let mut svg = axes.frame();
    for seconds in log_ticks(bars.from, end) {
        let (x, y) = (axes.x(seconds.ln()), NARROW.height - 8.0);
        let _ = write!(
            svg,
            "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>",
            short(seconds * 1e3)
        );
    }
    for (index, count) in (0..).zip(&bars.counts).filter(|(_, count)| **count > 0) {
        let from = bars.from * bars.factor.powi(index);
        let (x, y) = (axes.x(from.ln()), axes.y(*count as f64));
        let width = axes.x((from * bars.factor).ln()) - x - 0.8;
        let height = axes.y(0.0) - y;
        let _ = write!(
            svg,
            "<rect class=\"bar\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" \
             height=\"{height:.1}\" rx=\"1\"/>"
        );
    }
    for (class, seconds, anchor) in [("p50", bars.p50, "end"), ("p99", bars.p99, "end")] {
        let x = axes.x(seconds.ln());
        let text = if x < LEFT + 40.0 { "start" } else { anchor };
        let (floor, shift) = (axes.y(0.0), if text == "start" { 4.0 } else { -4.0 });
        let row = if class == "p50" { TOP - 8.0 } else { TOP + 5.0 };
        let _ = write!(
            svg,
            "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"4\" y2=\"{floor:.1}\"/>\
             <text class=\"{class}\" x=\"{:.1}\" y=\"{row}\" text-anchor=\"{text}\">{class} {}\
             </text>",
            x + shift,
            short(seconds * 1e3),
        );
    }
    svg.push_str("</svg>");
    PagePlot {
        title: title.to_owned(),
        svg,
        narrow: None,
    }
}

/// Plots a curve through `points`, with a limit of y.
pub(super) fn curve(title: &str, points: &[LabelledPoint], limit: f64) -> PagePlot {
    let draw = |frame| draw_curve(frame, points, limit);
    PagePlot {
        title: title.to_owned(),
        svg: draw(&WIDE),
        narrow: Some(draw(&NARROW)),
    }
}

fn draw_curve(frame: &'static Frame, points: &[LabelledPoint], limit: f64) -> String {
    let max = |value: fn(&LabelledPoint) -> f64| points.iter().map(value).fold(0.0, f64::max);
    let top = max(|point| point.y);
    // A limit far above all points would press them into the axis.
    let limit = Some(limit).filter(|limit| *limit <= top * 3.0);
    let axes = Axes::new(
        frame,
        (0.0, max(|point| point.x) * 1.05),
        limit.unwrap_or(0.0).max(top),
    );
    let mut svg = axes.start("");
    if let Some(limit) = limit {
        let (y, right) = (axes.y(limit), frame.width - RIGHT);
        let _ = write!(
            svg,
            "<line class=\"limit\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
        );
    }
    let place = |point: &LabelledPoint| (axes.x(point.x), axes.y(point.y));
    let line: Vec<String> = points
        .iter()
        .map(|point| format!("{:.1},{:.1}", place(point).0, place(point).1))
        .collect();
    let _ = write!(
        svg,
        "<polyline class=\"curve\" points=\"{}\"/>",
        line.join(" ")
    );
    for point in points {
        let (x, y) = place(point);
        let _ = write!(
            svg,
            "<circle class=\"dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            x - 6.0,
            y - 5.0,
            point.label
        );
    }
    svg.push_str("</svg>");
    svg
}

/// Maps values to places in the picture.
struct Axes {
    frame: &'static Frame,
    from: f64,
    to: f64,
    max: f64,
}

impl Axes {
    fn new(frame: &'static Frame, (from, to): (f64, f64), max: f64) -> Axes {
        Axes {
            frame,
            from,
            to: if to > from { to } else { from + 1.0 },
            max: if max > 0.0 { max } else { 1.0 },
        }
    }

    fn x(&self, value: f64) -> f64 {
        let width = self.frame.width - LEFT - RIGHT;
        LEFT + (value - self.from) / (self.to - self.from) * width
    }

    fn y(&self, value: f64) -> f64 {
        let height = self.frame.height - TOP - BOTTOM;
        TOP + (1.0 - value / self.max) * height
    }

    /// Starts a picture with the lines and the numbers of the vertical axis.
    fn frame(&self) -> String {
        let Frame { width, height } = self.frame;
        let mut svg = format!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\">");
        for value in ticks(0.0, self.max, 4.0) {
            let (y, right) = (self.y(value), width - RIGHT);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                short(value)
            );
        }
        svg
    }

    /// Starts a picture with both axes. The numbers of the horizontal one have `unit`.
    fn start(&self, unit: &str) -> String {
        let mut svg = self.frame();
        for value in ticks(self.from, self.to, self.frame.width / TICK) {
            let (x, y) = (self.x(value), self.frame.height - 8.0);
            let _ = write!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{}{unit}</text>",
                short(value)
            );
        }
        svg
    }
}

/// Returns about `count` round numbers between two values.
fn ticks(from: f64, to: f64, count: f64) -> Vec<f64> {
    let rough = (to - from) / count;
    let power = 10f64.powf(rough.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let factor = factors.iter().find(|factor| **factor * power >= rough);
    let step = factor.unwrap_or(&10.0) * power;
    let first = (from / step - 1e-9).ceil() as i64;
    let last = (to / step + 1e-9).floor() as i64;
    (first..=last).map(|index| index as f64 * step).collect()
}

/// Returns 1, 2 and 5 times powers of ten between two values, or fewer over a wide range.
fn log_ticks(from: f64, to: f64) -> Vec<f64> {
    let factors: &[f64] = if to / from > 200.0 {
        &[1.0]
    } else {
        &[1.0, 2.0, 5.0]
    };
    let powers = (from.log10().floor() as i32)..=(to.log10().ceil() as i32);
    let all = powers.flat_map(|power| factors.iter().map(move |by| by * 10f64.powi(power)));
    all.filter(|tick| (from..=to).contains(tick)).collect()
}

/// Writes a number with about three digits.
pub(super) fn short(value: f64) -> String {
    let text = match value.abs() {
        size if size >= 1e6 => return format!("{:.1}M", value / 1e6),
        size if size >= 1e4 => return format!("{:.0}k", value / 1e3),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_axis() {
        assert_eq!(ticks(0.0, 10.0, 4.0), [0.0, 5.0, 10.0]);
        assert_eq!(ticks(0.0, 7.3, 4.0), [0.0, 2.0, 4.0, 6.0]);
        assert_eq!(ticks(3.0, 4.0, 4.0), [3.0, 3.5, 4.0]);
        assert_eq!(log_ticks(0.9, 30.0), [1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!(log_ticks(0.5, 200.0), [1.0, 10.0, 100.0]);
    }

    #[test]
    fn numbers_have_about_three_digits() {
        let numbers = [0.0, 0.5, 12.0, 1234.0, 45_678.0, 2_500_000.0];
        let texts = numbers.map(short);
        assert_eq!(texts, ["0", "0.5", "12", "1234", "46k", "2.5M"]);
    }

    #[test]
    fn a_curve_goes_from_the_floor_to_the_top() {
        let plot = over_time("t", &[0.0, 10.0], 0.0, 2.0);
        let (floor, top) = (WIDE.height - BOTTOM, TOP);
        assert!(plot.svg.contains(&format!(",{floor:.1} ")), "{}", plot.svg);
        assert!(plot.svg.contains(&format!(",{top:.1}\"")), "{}", plot.svg);
        let narrow = plot.narrow.unwrap();
        assert!(narrow.contains("viewBox=\"0 0 330 200\""), "{narrow}");
        assert!(narrow.matches("middle").count() < plot.svg.matches("middle").count());
    }
}
