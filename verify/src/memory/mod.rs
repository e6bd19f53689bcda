//! Stands for memory: the arena and the lanes are the library's.

#[path = "../../../crates/warpipe/src/memory/arena.rs"]
pub(crate) mod arena;
#[path = "../../../crates/warpipe/src/memory/lane.rs"]
pub(crate) mod lane;
pub(crate) mod page;

pub(crate) mod board {
    use crate::backend::TimelineWord;

    #[derive(Debug)]
    pub(crate) struct Board(Vec<TimelineWord>);

    impl Board {
        pub(crate) fn words(&self) -> usize {
            self.0.len()
        }

        pub(crate) fn word(&self, index: usize) -> &TimelineWord {
            &self.0[index]
        }
    }
}

pub(crate) mod region {
    use crate::device::Device;
    use crate::error::Result;
    use crate::fork::PrivateFd;

    #[derive(Debug)]
    pub(crate) struct Region(u64);

    impl Region {
        pub(crate) fn allocate(_: &Device, bytes: u64) -> Result<Region> {
            Ok(Region(bytes.next_multiple_of(4096)))
        }

        pub(crate) fn export(&self) -> Result<PrivateFd> {
            Ok(PrivateFd)
        }

        pub(crate) fn bytes(&self) -> u64 {
            self.0
        }
    }
}
