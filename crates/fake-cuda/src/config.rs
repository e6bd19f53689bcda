//! The configuration of the fake driver by environment variables.

use std::sync::OnceLock;
use std::time::Duration;

/// The largest number of GPUs.
pub const DEVICES_MAX: usize = 8;

pub struct Config {
    /// The GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order, by their fixed number.
    pub visible: Vec<usize>,
    pub memory_bytes: u64,
    pub peers: bool,
    /// This process is a client of MPS.
    pub mps: bool,
    pub delay: Duration,
    /// How long a call takes that has a stream wait for words or write them.
    pub call: Duration,
    /// Function, call and code of each.
    pub failures: Vec<(String, u64, i32)>,
}

pub fn get() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| {
        let devices = number("FAKE_CUDA_DEVICES")
            .unwrap_or(1)
            .clamp(1, DEVICES_MAX as u64) as usize;
        Config {
            visible: visible(
                devices,
                std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref(),
            ),
            memory_bytes: number("FAKE_CUDA_MEMORY_MB").unwrap_or(65_536) << 20,
            peers: std::env::var_os("FAKE_CUDA_NO_PEER").is_none(),
            mps: std::env::var_os("FAKE_CUDA_NO_MPS").is_none(),
            delay: Duration::from_micros(number("FAKE_CUDA_DELAY_US").unwrap_or(0)),
            call: Duration::from_micros(number("FAKE_CUDA_CALL_US").unwrap_or(0)),
            failures: std::env::var("FAKE_CUDA_FAIL")
                .map(|text| failures(&text))
                .unwrap_or_default(),
        }
    })
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")),
    )
}

/// Like the driver, the list ends at its first entry that is no GPU.
fn visible(devices: usize, list: Option<&str>) -> Vec<usize> {
    let Some(list) = list else {
        return (0..devices).collect();
    };
    list.split(',')
        .map_while(|entry| {
            entry
                .trim()
                .parse()
                .ok()
                .filter(|&index: &usize| index < devices)
        })
        .collect()
}

fn failures(text: &str) -> Vec<(String, u64, i32)> {
    text.split(',')
        .map(|entry| failure(entry).unwrap_or_else(|| panic!("FAKE_CUDA_FAIL has {entry:?}")))
        .collect()
}

fn failure(entry: &str) -> Option<(String, u64, i32)> {
    let mut parts = entry.split(':');
    let function = parts.next()?.to_owned();
    let (call, code) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    parts.next().is_none().then_some((function, call, code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_visible_list_reorders_and_ends_at_the_first_stranger() {
        assert_eq!(visible(2, None), [0, 1]);
        assert_eq!(visible(2, Some("1,0")), [1, 0]);
        assert_eq!(visible(2, Some("1,7,0")), [1]);
        assert_eq!(visible(2, Some("")), Vec::<usize>::new());
    }

    #[test]
    fn a_failure_names_function_call_and_code() {
        let failure = failure("cuMemCreate:3:2").unwrap();
        assert_eq!(failure, ("cuMemCreate".to_owned(), 3, 2));
        assert!(super::failure("cuMemCreate:3").is_none());
    }
}
