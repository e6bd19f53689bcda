//! Charts of the distributions: one SVG for each benchmark, with a chart for each figure that has
//! one.

use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use warpipe_testkit::figure::{Figure, Quantiles};

const WIDTH: u32 = 760;
const CHART_HEIGHT: u32 = 260;

const OURS: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const FLOOR: RGBColor = RGBColor(0x9a, 0x9a, 0x9a);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws what can be drawn.
pub fn draw(folder: &Path, figures: &[Figure]) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let drawn: Vec<&Figure> = figures
        .iter()
        .filter(|figure| figure.ours_ns.is_some())
        .collect();
    for charts in drawn.chunk_by(|a, b| a.bench == b.bench) {
        let path = folder.join(format!("{}.svg", charts[0].bench));
        page(&path, charts).with_context(|| format!("cannot draw {}", path.display()))?;
    }
    Ok(())
}

fn page(path: &Path, figures: &[&Figure]) -> anyhow::Result<()> {
    let root =
        SVGBackend::new(path, (WIDTH, CHART_HEIGHT * figures.len() as u32)).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    for (area, figure) in root.split_evenly((figures.len(), 1)).iter().zip(figures) {
        chart(area, figure)?;
    }
    root.present().map_err(failed)
}

/// Latency over quantile, both series, on a logarithmic scale of microseconds.
fn chart(area: &Area<'_>, figure: &Figure) -> anyhow::Result<()> {
    let series = [
        ("ours", OURS, figure.ours_ns),
        ("floor", FLOOR, figure.floor_ns),
    ];
    let values = || {
        series
            .iter()
            .filter_map(|(.., quantiles)| *quantiles)
            .flat_map(|q| us(&q))
    };
    let low = values().fold(f64::INFINITY, f64::min) / 1.5;
    let high = values().fold(0.0, f64::max) * 1.5;
    let names = figure
        .ours_ns
        .map(|quantiles| quantiles.named().map(|(name, _)| name))
        .unwrap_or_default();
    let mut chart = ChartBuilder::on(area)
        .caption(
            format!("{}: {}", figure.bench, figure.name),
            ("sans-serif", 14),
        )
        .margin(10)
        .x_label_area_size(24)
        .y_label_area_size(64)
        .build_cartesian_2d(-0.3f64..4.3, whole_decades(low, high).log_scale())
        .map_err(failed)?;
    let label = |x: &f64| {
        names
            .get(x.round() as usize)
            .filter(|_| x.fract().abs() < 1e-6)
            .copied()
            .unwrap_or_default()
    };
    chart
        .configure_mesh()
        .x_labels(9)
        .x_label_formatter(&|x| label(x).to_owned())
        .y_desc("us")
        .y_label_formatter(&|y| {
            format!("{y:.3}")
                .trim_end_matches('0')
                .trim_end_matches('.')
                .to_owned()
        })
        .light_line_style(WHITE)
        .draw()
        .map_err(failed)?;
    for (name, color, quantiles) in series {
        let Some(quantiles) = quantiles else { continue };
        let points: Vec<(f64, f64)> = us(&quantiles)
            .into_iter()
            .enumerate()
            .map(|(i, us)| (i as f64, us))
            .collect();
        let line = LineSeries::new(points, color.stroke_width(2)).point_size(3);
        let swatch = move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2));
        chart
            .draw_series(line)
            .map_err(failed)?
            .label(name)
            .legend(swatch);
    }
    let legend = SeriesLabelPosition::UpperLeft;
    chart
        .configure_series_labels()
        .position(legend)
        .background_style(WHITE.mix(0.8))
        .draw()
        .map_err(failed)
}

/// The quantiles in microseconds. A logarithm has no zero: nothing is drawn below a nanosecond.
fn us(quantiles: &Quantiles) -> [f64; 5] {
    quantiles.named().map(|(_, ns)| ns.max(1) as f64 / 1e3)
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("{error}")
}

/// A range that begins and ends at a power of ten: the axis is labelled there, and a narrow one
/// would have no label.
fn whole_decades(low: f64, high: f64) -> std::ops::Range<f64> {
    10f64.powf(low.max(1e-3).log10().floor())..10f64.powf(high.max(1e-2).log10().ceil())
}
