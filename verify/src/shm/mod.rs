//! Stand-in for shared memory: the counters are the library's.

#[path = "../../../crates/warpipe/src/shm/counter.rs"]
pub(crate) mod counter;

pub(crate) mod page;
pub(crate) mod segment;

pub(crate) mod fence_words {
    use crate::backend::TimelineWord;

    #[derive(Debug)]
    pub(crate) struct FenceWords(Vec<TimelineWord>);

    impl FenceWords {
        pub(crate) fn words(&self) -> usize {
            self.0.len()
        }

        pub(crate) fn word(&self, index: usize) -> &TimelineWord {
            &self.0[index]
        }
    }
}
