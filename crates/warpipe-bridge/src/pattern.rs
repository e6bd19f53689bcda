//! Patterns of endpoint names: `*` is one part of a name, `**` any number of parts.

use crate::error::{Error, Result};

/// The most bytes of a pattern.
pub(crate) const PATTERN_BYTES_MAX: usize = 256;

/// A checked pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern(Vec<String>);

impl Pattern {
    pub(crate) fn new(text: &str) -> Result<Pattern> {
        let refuse = |reason| {
            Err(Error::Pattern {
                pattern: text.chars().take(80).collect(),
                reason,
            })
        };
        if text.len() > PATTERN_BYTES_MAX {
            return refuse("is longer than 256 bytes");
        }
        let parts: Vec<String> = text.split('/').map(str::to_owned).collect();
        if parts.iter().any(String::is_empty) {
            return refuse("has an empty part");
        }
        if parts
            .iter()
            .any(|part| part.contains('*') && part != "*" && part != "**")
        {
            return refuse("has a * inside a part");
        }
        // Each `**` is tried at every length: two of them are enough, more cost time.
        if parts.iter().filter(|part| *part == "**").count() > 2 {
            return refuse("has more than two **");
        }
        Ok(Pattern(parts))
    }

    pub(crate) fn matches(&self, name: &str) -> bool {
        let parts: Vec<&str> = name.split('/').collect();
        fits(&self.0, &parts)
    }
}

/// Checks all of them.
pub(crate) fn all(texts: &[String]) -> Result<Vec<Pattern>> {
    texts.iter().map(|text| Pattern::new(text)).collect()
}

fn fits(pattern: &[String], name: &[&str]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((first, rest)) if first == "**" => {
            (0..=name.len()).any(|skipped| fits(rest, &name[skipped..]))
        }
        Some((first, rest)) => name
            .split_first()
            .is_some_and(|(part, left)| (first == "*" || first == part) && fits(rest, left)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_one_part_and_two_are_any_number() {
        let fits = |pattern: &str, name: &str| Pattern::new(pattern).unwrap().matches(name);
        assert!(fits("camera/**", "camera/front/left") && fits("camera/**", "camera"));
        assert!(fits("camera/*", "camera/front") && !fits("camera/*", "camera/front/left"));
        assert!(fits("**/left", "camera/left") && !fits("**/left", "camera/right"));
        assert!(fits("jobs", "jobs") && !fits("jobs", "jobs2"));
    }

    #[test]
    fn a_pattern_that_can_match_no_name_is_refused() {
        for wrong in ["", "a//b", "/a", "cam*", "**/a/**/b/**", &"a".repeat(257)] {
            assert!(Pattern::new(wrong).is_err(), "{wrong}");
        }
    }
}
