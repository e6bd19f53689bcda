//! Tests of the screen, without a terminal.

use std::path::Path;

use super::draw::{Frame, draw};
use super::keys::Key;
use super::view::{Tab, View, Wish};
use crate::observe::{EndpointRow, MemoryRow, ProcessRow, Rate, Snapshot, SubscriberRow};
use crate::output::Style;

fn endpoint(name: &str, items: u64) -> EndpointRow {
    EndpointRow {
        name: name.into(),
        kind: Some("publisher".into()),
        state: "live",
        foreign: None,
        pid: Some(4711),
        device: Some("host".into()),
        items,
        bytes: items * 1024,
        timed: items,
        latency_ns: items * 12_000,
        in_flight: 3,
        dropped: 0,
        memory: 8 << 20,
        memory_max: 1 << 30,
        peers: 1,
        depth: 16,
        waiting: 0,
        copied: None,
        subscribers: Vec::new(),
        rate: Some(Rate {
            items_per_second: items as f64,
            bytes_per_second: (items * 1024) as f64,
            latency_ns: Some(12_000),
        }),
        generation: [1, 2],
    }
}

fn subscriber(pid: i32, state: &'static str) -> SubscriberRow {
    SubscriberRow {
        pid,
        uid: 1000,
        state,
        lag: 2,
        behind: Some(5),
        dropped: 0,
        silent_seconds: 1.2,
    }
}

/// A look with one of each.
pub fn sample() -> Snapshot {
    let mut camera = endpoint("camera/front", 1234);
    camera.subscribers = vec![
        subscriber(4801, "active"),
        subscriber(4802, "stalled"),
        subscriber(4803, "suspect"),
    ];
    camera.peers = 3;
    let mut lidar = endpoint("lidar", 99);
    lidar.dropped = 7;
    let stale = EndpointRow {
        kind: None,
        state: "stale",
        pid: None,
        ..endpoint("old", 0)
    };
    Snapshot {
        domain: "/run/user/1000/warpipe".into(),
        taken_ns: 1,
        endpoints: vec![camera, lidar, stale],
        processes: vec![ProcessRow {
            pid: 4711,
            command: "grabber".into(),
            state: "stopped",
            descriptors: 27,
            endpoints: 2,
            is_in_domain: true,
            gpu_owned: 3 << 30,
            gpu_imported: 0,
            host_owned: 8 << 20,
            host_imported: 0,
            gpu_kept: 0,
            host_kept: 0,
            slow_paths: Vec::new(),
        }],
        memory: vec![
            MemoryRow {
                bytes: 3 << 30,
                device: "GPU-1".into(),
                endpoint: Some("camera/front".into()),
                owner: Some(4711),
                borrowers: vec![4801, 4802],
                keepers: Vec::new(),
            },
            MemoryRow {
                bytes: 4096,
                device: "host".into(),
                endpoint: None,
                owner: None,
                borrowers: vec![4801],
                keepers: Vec::new(),
            },
        ],
        notes: Vec::new(),
    }
}

fn view_of(snapshot: Snapshot) -> View {
    let mut view = View::default();
    view.update(Ok(snapshot));
    view
}

/// The letter and the style of each cell. A span outside of the frame has no cells.
type Cells = Vec<Vec<(char, Style)>>;

fn frame(view: &mut View, width: u16, height: u16) -> Cells {
    let Frame { width, lines } = draw(view, width, height);
    let line = |spans: Vec<super::draw::Span>| {
        let mut cells = vec![(' ', Style::Plain); width.into()];
        for span in spans {
            for (at, letter) in (usize::from(span.x)..).zip(span.text.chars()) {
                cells[at] = (letter, span.style);
            }
        }
        cells
    };
    lines.into_iter().map(line).collect()
}

fn lines(cells: &Cells) -> Vec<String> {
    let text = |line: &Vec<(char, Style)>| line.iter().map(|cell| cell.0).collect::<String>();
    let lines = cells.iter().map(text);
    lines.map(|line| line.trim_end().to_owned()).collect()
}

/// The lines of rows, without head, foot and details.
fn names(view: &mut View) -> Vec<String> {
    let shown = lines(&frame(view, 120, 40));
    let rows = shown[3..39]
        .iter()
        .filter(|line| !line.is_empty() && !line.starts_with(' '));
    rows.map(|line| line.split(' ').next().unwrap().to_owned())
        .collect()
}

fn type_text(view: &mut View, text: &str) {
    for letter in text.chars() {
        assert_eq!(view.press(Key::Char(letter)), Wish::Stay);
    }
}

#[test]
fn a_stalled_and_a_suspect_peer_are_seen_by_their_colours() {
    let mut view = view_of(sample());
    let buffer = frame(&mut view, 120, 20);
    let shown = lines(&buffer);
    let style = |part: &str| {
        let y = shown.iter().position(|line| line.contains(part)).unwrap();
        let x = shown[y].find(part).unwrap();
        buffer[y][x].1
    };
    assert_eq!(style("stalled"), Style::Yellow);
    assert_eq!(style("suspect"), Style::Red);
    assert_eq!(style("active"), Style::Dim);
    assert_eq!(style("stale "), Style::Red);
    assert!(
        shown.iter().any(|line| line.contains("lag 2  behind 5")),
        "{shown:?}"
    );
}

#[test]
fn keys_choose_the_table_the_order_and_the_rows() {
    let mut view = view_of(sample());
    assert_eq!(names(&mut view), ["camera/front", "lidar", "old"]);
    type_text(&mut view, "r");
    assert_eq!(names(&mut view), ["old", "lidar", "camera/front"]);
    // By the rate, the largest first.
    type_text(&mut view, "rssss");
    assert_eq!(names(&mut view), ["camera/front", "lidar", "old"]);
    type_text(&mut view, "/LID");
    assert_eq!(names(&mut view), ["lidar"]);
    view.press(Key::Enter);
    type_text(&mut view, "2");
    assert_eq!(view.tab, Tab::Processes);
    assert_eq!(names(&mut view), [] as [&str; 0]);
    view.press(Key::Escape);
    assert_eq!(names(&mut view), ["grabber"]);
    view.press(Key::Tab);
    assert_eq!(view.tab, Tab::Memory);
    // While a filter is typed, letters are no commands.
    type_text(&mut view, "/q");
    assert_eq!(view.press(Key::Interrupt), Wish::Quit);
    view.press(Key::Escape);
    assert_eq!(view.press(Key::Char('q')), Wish::Quit);
}

#[test]
fn what_is_not_known_is_last_in_either_order() {
    let mut snapshot = sample();
    // A pool counts no samples.
    snapshot.endpoints[0].depth = 0;
    let mut view = view_of(snapshot);
    // By the rate.
    type_text(&mut view, "ssss");
    assert_eq!(names(&mut view), ["lidar", "camera/front", "old"]);
    type_text(&mut view, "r");
    assert_eq!(names(&mut view), ["lidar", "camera/front", "old"]);
    let shown = lines(&frame(&mut view, 160, 20));
    let camera = shown.iter().find(|line| line.contains("camera/front"));
    let cells: Vec<&str> = camera.unwrap().split_whitespace().collect();
    assert_eq!(cells[4..], ["-", "-", "-", "-", "-", "3", "8.0", "MiB"]);
}

#[test]
fn a_thousand_endpoints_scroll_from_the_first_to_the_last() {
    let mut snapshot = sample();
    snapshot.endpoints = (0..1000)
        .map(|n| endpoint(&format!("e{n:04}"), n))
        .collect();
    let mut view = view_of(snapshot);
    assert_eq!(names(&mut view).first().unwrap(), "e0000");
    view.press(Key::PageDown);
    assert_eq!(names(&mut view).first().unwrap(), "e0036");
    view.press(Key::End);
    assert_eq!(names(&mut view).last().unwrap(), "e0999");
    view.press(Key::Down);
    assert_eq!(names(&mut view).last().unwrap(), "e0999");
    view.press(Key::Home);
    view.press(Key::Up);
    assert_eq!(names(&mut view).first().unwrap(), "e0000");
}

#[test]
fn every_subscriber_of_an_endpoint_is_scrolled_to() {
    let mut snapshot = sample();
    snapshot.endpoints.truncate(2);
    snapshot.endpoints[0].subscribers = (0..100).map(|n| subscriber(5000 + n, "active")).collect();
    let mut view = view_of(snapshot);
    let mut seen = String::new();
    let mut last = Vec::new();
    loop {
        let shown = lines(&frame(&mut view, 120, 24));
        if shown == last {
            break;
        }
        seen += &shown.join("\n");
        last = shown;
        view.press(Key::PageDown);
    }
    let missing = (0..100).find(|n| !seen.contains(&format!("process {}", 5000 + n)));
    assert_eq!(missing, None);
    assert!(seen.contains("\nlidar "), "{seen}");
}

#[test]
fn a_screen_of_any_size_is_drawn() {
    for (width, height) in [
        (0, 0),
        (1, 1),
        (2, 3),
        (15, 4),
        (17, 5),
        (80, 24),
        (300, 100),
    ] {
        for tab in "123".chars() {
            let mut view = view_of(sample());
            type_text(&mut view, &tab.to_string());
            view.press(Key::End);
            let cells = frame(&mut view, width, height);
            assert_eq!(cells.len(), usize::from(height));
            assert!(cells.iter().all(|line| line.len() == usize::from(width)));
        }
    }
}

#[test]
fn a_domain_that_vanishes_leaves_no_rows_and_the_reason() {
    let mut view = view_of(sample());
    view.update(Err("the domain cannot be read: \x1b[2J".into()));
    let shown = lines(&frame(&mut view, 160, 20)).join("\n");
    assert!(
        shown.contains("the domain cannot be read: \\u{1b}[2J"),
        "{shown}"
    );
    assert!(
        !shown.contains("camera") && !shown.contains('\x1b'),
        "{shown}"
    );
    view.update(Ok(sample()));
    assert_eq!(names(&mut view).len(), 3);
}

#[test]
fn a_paused_screen_keeps_its_numbers() {
    let mut view = view_of(sample());
    type_text(&mut view, " ");
    view.update(Ok(Snapshot::default()));
    assert_eq!(names(&mut view).len(), 3);
    type_text(&mut view, " ");
    view.update(Ok(Snapshot::default()));
    assert_eq!(names(&mut view).len(), 0);
}

#[test]
fn absurd_numbers_of_a_page_are_drawn() {
    let mut snapshot = sample();
    let camera = &mut snapshot.endpoints[0];
    (camera.items, camera.bytes, camera.in_flight) = (u64::MAX, u64::MAX, u64::MAX);
    (camera.dropped, camera.memory, camera.peers) = (u64::MAX, u64::MAX, u64::MAX);
    camera.subscribers[0].lag = u64::MAX;
    camera.subscribers[0].silent_seconds = f64::MAX;
    snapshot.processes[0].gpu_owned = u64::MAX;
    let other = ProcessRow {
        pid: 1,
        ..snapshot.processes[0].clone()
    };
    snapshot.processes.push(other);
    let mut view = view_of(snapshot);
    for tab in "123".chars() {
        type_text(&mut view, &tab.to_string());
        frame(&mut view, 100, 30);
    }
}

/// The picture of the guide, from the same view that is tested. Run with
/// `WARPIPE_BLESS=1` to write it anew.
#[test]
fn the_picture_in_the_guide_is_what_top_draws() {
    let mut view = view_of(sample());
    let svg = svg(&frame(&mut view, 118, 12));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/top.svg");
    if std::env::var_os("WARPIPE_BLESS").is_some() {
        std::fs::write(&path, &svg).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap();
    assert!(
        kept == svg,
        "{} is stale: run this test with WARPIPE_BLESS=1",
        path.display()
    );
}

/// The parts of a line between two or more blanks, each with its column. A viewer may drop blanks at
/// the ends of a text, or stretch them: each part has its own place.
fn parts(line: &str) -> Vec<(u16, &str)> {
    let mut parts = Vec::new();
    let mut at = 0;
    for part in line.split("  ") {
        let text = part.trim_start();
        if !text.is_empty() {
            let blanks = part.len() - text.len();
            parts.push((at + blanks as u16, text.trim_end()));
        }
        at += part.chars().count() as u16 + 2;
    }
    parts
}

/// A frame as an SVG picture: texts for each run of cells of one style.
fn svg(cells: &Cells) -> String {
    use std::fmt::Write;
    const CELL: (u16, u16) = (8, 17);
    let (width, height) = (cells[0].len() as u16, cells.len() as u16);
    let size = (width * CELL.0 + 16, height * CELL.1 + 16);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" \
         font-family=\"monospace\" font-size=\"13\" xml:space=\"preserve\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#1b1d21\"/>\n",
        size.0, size.1
    );
    for y in 0..height {
        let mut x = 0;
        while x < width {
            let cell = |x: u16| cells[usize::from(y)][usize::from(x)];
            let style = |x: u16| cell(x).1;
            let end = (x..width)
                .find(|&at| style(at) != style(x))
                .unwrap_or(width);
            let text: String = (x..end).map(|at| cell(at).0).collect();
            let reversed = style(x) == Style::Reversed;
            let left = x * CELL.0 + 8;
            if reversed {
                let (top, wide) = (y * CELL.1 + 9, (end - x) * CELL.0);
                let _ = writeln!(
                    svg,
                    "<rect x=\"{left}\" y=\"{top}\" width=\"{wide}\" height=\"{}\" fill=\"#d8dade\"/>",
                    CELL.1
                );
            }
            if !text.trim().is_empty() {
                let fill = match style(x) {
                    Style::Reversed => "#1b1d21",
                    Style::Red => "#ff6b68",
                    Style::Green => "#7fc97f",
                    Style::Yellow => "#e8c15a",
                    Style::Dim => "#8d929b",
                    Style::Plain | Style::Bold | Style::Underlined => "#d8dade",
                };
                let bold = matches!(style(x), Style::Bold | Style::Red);
                let weight = if bold { " font-weight=\"bold\"" } else { "" };
                for (at, part) in parts(&text) {
                    let _ = writeln!(
                        svg,
                        "<text x=\"{}\" y=\"{}\" textLength=\"{}\" fill=\"{fill}\"{weight}>{}</text>",
                        left + at * CELL.0,
                        y * CELL.1 + 22,
                        part.chars().count() as u16 * CELL.0,
                        part.replace('&', "&amp;").replace('<', "&lt;")
                    );
                }
            }
            x = end;
        }
    }
    svg + "</svg>\n"
}
