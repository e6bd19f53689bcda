//! The metadata of jobs and answers: at most 256 bytes beside the tensor of a sample.
//!
//! ```text
//! job     1  job u64  delivery u32  attempt u32  deadline u64   then the user's bytes, at most 200
//! answer  kind u8  job u64  delivery u32                        then the user's bytes, or a reason
//! ```
//!
//! Little endian. The *delivery* counts how often a job was delivered, also where it was returned;
//! the *attempt* is one more than the number of attempts that failed. An answer to a delivery that
//! its worker does not hold breaks the protocol.

use crate::error::{Error, Result};
use crate::pubsub::entry::{Metadata, Violation, violation};

/// The most bytes of the user's own that travel with a job or its result.
pub const JOB_META_BYTES_MAX: usize = 200;

const JOB: u8 = 1;
const JOB_BYTES: usize = 25;
const ANSWER_BYTES: usize = 13;

/// One delivery of a job, as its worker sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeliveryTag {
    pub(crate) job: u64,
    /// How often the job has been delivered, this time included.
    pub(crate) number: u32,
    /// The number of the attempt, from 1.
    pub(crate) attempt: u32,
    /// `CLOCK_MONOTONIC` nanoseconds after which the job must not be begun; 0 for none.
    pub(crate) deadline_ns: u64,
}

impl DeliveryTag {
    /// Encodes the tag, followed by the user's bytes.
    pub(crate) fn encode(&self, user: &[u8]) -> Result<Metadata> {
        let mut bytes = Vec::with_capacity(JOB_BYTES + user.len());
        bytes.push(JOB);
        bytes.extend(self.job.to_le_bytes());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.attempt.to_le_bytes());
        bytes.extend(self.deadline_ns.to_le_bytes());
        bytes.extend(check_user(user)?);
        Metadata::new(&bytes)
    }

    /// The tag; the user's bytes begin at [`user_of_job`].
    pub(crate) fn decode(bytes: &[u8]) -> Result<DeliveryTag, Violation> {
        let wrong = || {
            violation(
                "job metadata",
                format!("{} bytes", bytes.len()),
                "a job's delivery tag",
            )
        };
        let mut rest = bytes;
        let mut read = || {
            let [kind] = take(&mut rest)?;
            let tag = DeliveryTag {
                job: u64::from_le_bytes(take(&mut rest)?),
                number: u32::from_le_bytes(take(&mut rest)?),
                attempt: u32::from_le_bytes(take(&mut rest)?),
                deadline_ns: u64::from_le_bytes(take(&mut rest)?),
            };
            (kind == JOB && rest.len() <= JOB_META_BYTES_MAX).then_some(tag)
        };
        let tag = read().ok_or_else(wrong)?;
        if tag.job == 0 || tag.number == 0 || tag.attempt == 0 {
            let found = format!("{tag:?}");
            let allowed = "numbers from 1";
            return Err(violation("job delivery tag", found, allowed));
        }
        Ok(tag)
    }
}

/// The user's bytes in the metadata of a job that was decoded.
pub(crate) fn user_of_job(bytes: &[u8]) -> &[u8] {
    bytes.get(JOB_BYTES..).unwrap_or_default()
}

/// The user's bytes in the metadata of a result that was decoded.
pub(crate) fn user_of_answer(bytes: &[u8]) -> &[u8] {
    bytes.get(ANSWER_BYTES..).unwrap_or_default()
}

/// The outcome of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AnswerKind {
    /// The sample is the result.
    Completed,
    /// The attempt failed, and counts.
    Failed(String),
    /// The job was not begun, or is for another worker. The attempt does not count.
    Returned,
    /// The job is not tried again.
    Rejected(String),
    /// The deadline had passed.
    Expired,
}

/// One answer of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) job: u64,
    pub(crate) number: u32,
    pub(crate) kind: AnswerKind,
}

impl Answer {
    pub(crate) fn encode(&self, user: &[u8]) -> Result<Metadata> {
        let (kind, rest) = match &self.kind {
            AnswerKind::Completed => (1, check_user(user)?),
            AnswerKind::Failed(reason) => (2, cut(reason).as_bytes()),
            AnswerKind::Returned => (3, &[][..]),
            AnswerKind::Rejected(reason) => (4, cut(reason).as_bytes()),
            AnswerKind::Expired => (5, &[][..]),
        };
        let mut bytes = vec![kind];
        bytes.extend(self.job.to_le_bytes());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(rest);
        Metadata::new(&bytes)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Answer, Violation> {
        let wrong = || {
            violation(
                "answer metadata",
                format!("{} bytes", bytes.len()),
                "an answer to a job",
            )
        };
        let mut rest = bytes;
        let mut read = || {
            let [kind] = take(&mut rest)?;
            let job = u64::from_le_bytes(take(&mut rest)?);
            Some((kind, job, u32::from_le_bytes(take(&mut rest)?)))
        };
        let (kind, job, number) = read().ok_or_else(wrong)?;
        if rest.len() > JOB_META_BYTES_MAX {
            return Err(wrong());
        }
        let reason = || {
            String::from_utf8_lossy(rest)
                .chars()
                .filter(|c| !c.is_control())
                .collect::<String>()
        };
        let kind = match (kind, rest.is_empty()) {
            (1, _) => AnswerKind::Completed,
            (2, _) => AnswerKind::Failed(reason()),
            (3, true) => AnswerKind::Returned,
            (4, _) => AnswerKind::Rejected(reason()),
            (5, true) => AnswerKind::Expired,
            (kind, _) => return Err(violation("answer kind", kind, "1 to 5")),
        };
        Ok(Answer { job, number, kind })
    }
}

pub(crate) fn check_user(user: &[u8]) -> Result<&[u8]> {
    if user.len() <= JOB_META_BYTES_MAX {
        return Ok(user);
    }
    let found = format!("{} bytes", user.len());
    let allowed = format!("at most {JOB_META_BYTES_MAX} bytes");
    Err(Error::argument("metadata", found, allowed))
}

/// The beginning of a reason, as long as one may be.
pub(crate) fn cut(reason: &str) -> &str {
    let end = (0..=JOB_META_BYTES_MAX.min(reason.len()))
        .rev()
        .find(|&end| reason.is_char_boundary(end));
    &reason[..end.unwrap_or(0)]
}

/// Takes the first bytes, as a number has them.
fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delivery_tag_decodes_as_it_was_encoded() {
        let tag = DeliveryTag {
            job: 7,
            number: 3,
            attempt: 2,
            deadline_ns: 9,
        };
        let metadata = tag.encode(b"mine").unwrap();
        assert_eq!(DeliveryTag::decode(metadata.as_bytes()).unwrap(), tag);
        assert_eq!(user_of_job(metadata.as_bytes()), b"mine");
        assert!(tag.encode(&[0; JOB_META_BYTES_MAX]).is_ok());
        assert!(tag.encode(&[0; JOB_META_BYTES_MAX + 1]).is_err());
    }

    #[test]
    fn every_answer_comes_out_as_it_went_in_and_long_reasons_are_cut() {
        let kinds = [
            AnswerKind::Completed,
            AnswerKind::Failed("why".into()),
            AnswerKind::Returned,
            AnswerKind::Expired,
        ];
        for kind in kinds {
            let answer = Answer {
                job: 1,
                number: 2,
                kind,
            };
            assert_eq!(
                Answer::decode(answer.encode(b"").unwrap().as_bytes()).unwrap(),
                answer
            );
        }
        let long = Answer {
            job: 1,
            number: 2,
            kind: AnswerKind::Rejected("é".repeat(500)),
        };
        let AnswerKind::Rejected(reason) = Answer::decode(long.encode(b"").unwrap().as_bytes())
            .unwrap()
            .kind
        else {
            panic!("another verdict")
        };
        assert_eq!(reason, "é".repeat(100));
    }

    #[test]
    fn no_bytes_make_a_decoder_panic_and_garbage_is_refused() {
        for length in 0..=256 {
            for fill in [0u8, 1, 2, 3, 5, 9, 0xff] {
                let bytes = vec![fill; length];
                let _ = (DeliveryTag::decode(&bytes), Answer::decode(&bytes));
            }
        }
        assert!(Answer::decode(&[9; 20]).is_err());
        assert!(
            Answer::decode(&[3; 20]).is_err(),
            "a return says nothing more"
        );
        assert!(DeliveryTag::decode(&[0; 25]).is_err());
        assert!(DeliveryTag::decode(&[1; 24]).is_err());
    }
}
