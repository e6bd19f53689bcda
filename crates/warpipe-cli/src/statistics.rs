//! Latencies of many items in little room: a histogram that processes can add up.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Bits of precision: a bucket is at most 1/32 of its value wide.
const PRECISION_BITS: u32 = 5;

/// Counts in buckets of about 3 % width, over all of `u64` nanoseconds; at most 1,920 buckets.
///
/// As JSON a list of pairs: a map's keys would be strings, which do not come back as numbers
/// everywhere.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(u16, u64)>", into = "Vec<(u16, u64)>")]
pub struct Histogram {
    buckets: BTreeMap<u16, u64>,
}

impl From<Vec<(u16, u64)>> for Histogram {
    fn from(pairs: Vec<(u16, u64)>) -> Histogram {
        Histogram {
            buckets: pairs.into_iter().collect(),
        }
    }
}

impl From<Histogram> for Vec<(u16, u64)> {
    fn from(histogram: Histogram) -> Vec<(u16, u64)> {
        histogram.buckets.into_iter().collect()
    }
}

impl Histogram {
    /// Counts one duration.
    pub fn record(&mut self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        *self.buckets.entry(bucket(ns)).or_default() += 1;
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Histogram) {
        for (&bucket, &count) in &other.buckets {
            let sum = self.buckets.entry(bucket).or_default();
            *sum = sum.saturating_add(count);
        }
    }

    /// The duration that `permille` of all are at or below (up to the bucket's width); none if
    /// nothing was counted.
    pub fn quantile(&self, permille: u64) -> Option<Duration> {
        let total: u128 = self.buckets.values().map(|&count| u128::from(count)).sum();
        let rank = (total * u128::from(permille.min(1000)))
            .div_ceil(1000)
            .max(1);
        let mut seen = 0u128;
        for (&bucket, &count) in &self.buckets {
            seen += u128::from(count);
            if seen >= rank {
                return Some(Duration::from_nanos(upper_bound(bucket)));
            }
        }
        None
    }
}

fn bucket(ns: u64) -> u16 {
    let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(PRECISION_BITS + 1);
    ((shift << PRECISION_BITS) + (ns >> shift) as u32) as u16
}

/// The largest value of a bucket. A bucket that no value has (from another process) gives the
/// largest of all.
fn upper_bound(bucket: u16) -> u64 {
    let bucket = u32::from(bucket);
    let shift = (bucket >> PRECISION_BITS).saturating_sub(1);
    let lead = u64::from(bucket - (shift << PRECISION_BITS));
    if shift > u64::BITS - PRECISION_BITS - 1 {
        return u64::MAX;
    }
    (lead << shift) | ((1 << shift) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_lies_in_its_bucket_and_the_bucket_is_narrow() {
        let mut values = vec![0, 1, 31, 32, 33, 63, 64, 65, u64::MAX - 1, u64::MAX];
        values.extend((0..64).map(|power| 1u64 << power));
        values.extend((1..40).map(|power| 3u64.pow(power)));
        for value in values {
            let upper = upper_bound(bucket(value));
            assert!(
                upper >= value && upper - value <= value / 32,
                "{value} in a bucket up to {upper}"
            );
            assert_eq!(bucket(upper), bucket(value));
            assert!(
                upper == u64::MAX || bucket(upper + 1) == bucket(value) + 1,
                "no gap after {upper}"
            );
        }
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_values() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(500), None);
        (1..=30).for_each(|ns| histogram.record(Duration::from_nanos(ns)));
        let quantile = |permille| histogram.quantile(permille).unwrap().as_nanos();
        assert_eq!(
            (quantile(0), quantile(500), quantile(990), quantile(1000)),
            (1, 15, 30, 30)
        );
    }

    #[test]
    fn merged_counts_are_the_counts_of_both() {
        let (mut one, mut two, mut both) = (
            Histogram::default(),
            Histogram::default(),
            Histogram::default(),
        );
        for ns in (0..1000).map(|n| n * n) {
            if ns % 3 == 0 { &mut one } else { &mut two }.record(Duration::from_nanos(ns));
            both.record(Duration::from_nanos(ns));
        }
        one.merge(&two);
        assert_eq!(one, both);
    }

    #[test]
    fn a_histogram_survives_its_way_through_json() {
        let mut histogram = Histogram::default();
        histogram.record(Duration::from_micros(77));
        let text = serde_json::to_string(&histogram).unwrap();
        assert_eq!(serde_json::from_str::<Histogram>(&text).unwrap(), histogram);
        let strange: Histogram = serde_json::from_str("[[65535,1]]").unwrap();
        assert_eq!(strange.quantile(500), Some(Duration::from_nanos(u64::MAX)));
    }
}
