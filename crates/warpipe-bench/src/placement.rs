//! The round trip of `handoff` with both processes kept to CPUs: of one core, of the GPU's NUMA node,
//! and of another one.

use std::path::Path;

use warpipe_cli::cpus::{self, Neighbours};
use warpipe_testkit::figure::Figure;

use super::handoff::{Answer, Terms, measure};
use super::setup::{IN_FLIGHT, Setup};

/// Of the rounds, after one that warms up.
const ROUNDS: usize = 3;

/// A place for two processes.
#[derive(Debug, PartialEq, Eq)]
struct Pair {
    name: &'static str,
    cpus: [usize; 2],
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    if setup.is_host() {
        return Ok(Vec::new());
    }
    let root = Path::new("/");
    let allowed = cpus::allowed();
    let beside = cpus::beside(root, &setup.device.info().id.to_string());
    let pairs = pairs(&allowed, beside.as_ref(), |cpu| cpus::siblings(root, cpu));
    let note = match &beside {
        Some(Neighbours {
            node: Some(node),
            cpus,
        }) => {
            format!(
                "the GPU's NUMA node is {node}, with CPUs {}",
                cpus::listed(cpus)
            )
        }
        Some(_) => "the GPU has no NUMA node of its own".to_owned(),
        None => "the driver does not show the GPU's NUMA node".to_owned(),
    };
    let mut figures = vec![case(setup, "not pinned".to_owned(), None)?];
    for Pair { name, cpus } in pairs {
        let [a, b] = cpus;
        figures.push(case(
            setup,
            format!("{name}, CPUs {a} and {b}"),
            Some(cpus),
        )?);
    }
    Ok(figures
        .into_iter()
        .map(|figure| figure.note(note.clone()))
        .collect())
}

fn case(setup: &Setup, name: String, cpus: Option<[usize; 2]>) -> anyhow::Result<Figure> {
    let (piped, single) = (setup.times(300), setup.times(100));
    let terms = Terms {
        place: setup.place(),
        answer: Answer::Kernel,
        bytes: 4096,
        depth: IN_FLIGHT,
        rounds: setup.rounds().min(ROUNDS),
        piped,
        single,
        cpus,
    };
    let measured = measure(setup, &terms)?;
    let name = format!("kernel -> kernel, one device, {name}");
    Ok(Figure::new("placement", name, "us", &measured.ours)
        .beside(&measured.floor)
        .spread(measured.ours_single, measured.floor_single))
}

/// The pairs that the CPUs which this process may use have. Without a known node all are near.
fn pairs(
    allowed: &[usize],
    beside: Option<&Neighbours>,
    siblings: impl Fn(usize) -> Vec<usize>,
) -> Vec<Pair> {
    let is_near = |cpu: usize| match beside {
        Some(Neighbours {
            node: Some(_),
            cpus,
        }) => cpus.contains(&cpu),
        _ => true,
    };
    let (near, far): (Vec<usize>, Vec<usize>) = allowed.iter().partition(|&&cpu| is_near(cpu));
    let apart = |cpus: &[usize]| {
        let first = *cpus.first()?;
        let same_core = siblings(first);
        let other = cpus.iter().find(|cpu| !same_core.contains(cpu))?;
        Some([first, *other])
    };
    let one_core = near.iter().find_map(|&cpu| {
        let mut others = siblings(cpu).into_iter();
        let other = others.find(|&other| other != cpu && allowed.contains(&other))?;
        Some([cpu, other])
    });
    let is_known = beside.is_some_and(|beside| beside.node.is_some());
    let two_cores = if is_known {
        "the GPU's node"
    } else {
        "two cores"
    };
    let one_each = near.first().zip(far.first()).map(|(&a, &b)| [a, b]);
    let found = [
        ("one core", one_core),
        (two_cores, apart(&near)),
        ("another node", apart(&far)),
        ("one on the GPU's node, one on another", one_each),
    ];
    let found = found.into_iter();
    found
        .filter_map(|(name, cpus)| Some(Pair { name, cpus: cpus? }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four cores of two threads each: 0 and 4 share one, and so on.
    fn siblings(cpu: usize) -> Vec<usize> {
        vec![cpu % 4, cpu % 4 + 4]
    }

    #[test]
    fn the_pairs_lie_on_one_core_on_one_node_and_on_two() {
        let beside = Neighbours {
            node: Some(1),
            cpus: vec![2, 3, 6, 7],
        };
        let all: Vec<usize> = (0..8).collect();
        let found = pairs(&all, Some(&beside), siblings)
            .into_iter()
            .map(|pair| pair.cpus);
        assert_eq!(found.collect::<Vec<_>>(), [[2, 6], [2, 3], [0, 1], [2, 0]]);
    }

    #[test]
    fn a_pair_that_the_machine_lacks_is_left_out() {
        assert_eq!(pairs(&[3], None, siblings), []);
        let found = pairs(&[0, 1], None, siblings);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name, found[0].cpus), ("two cores", [0, 1]));
    }
}
