//! Stand-in for the threads of a process and for values dropped after streams.

pub(crate) mod fence {
    use crate::stream::Stream;

    #[derive(Debug, Default)]
    pub(crate) struct StreamSet;

    impl StreamSet {
        pub(crate) fn record_use(&self, _: &Stream) {}
    }
}

pub(crate) mod heartbeat {
    use std::time::Duration;

    use crate::queue::states;

    /// The model's clock, from when this was made.
    #[derive(Debug)]
    pub(crate) struct Uptime(Duration);

    impl Default for Uptime {
        fn default() -> Uptime {
            Uptime(states::now())
        }
    }

    impl Uptime {
        pub(crate) fn ran(&self) -> Duration {
            states::now().saturating_sub(self.0)
        }
    }
}

#[path = "../../crates/warpipe/src/runtime/releasable.rs"]
pub(crate) mod releasable;

pub(crate) mod reactor {
    pub(crate) const TICK: std::time::Duration = std::time::Duration::from_millis(100);
}
