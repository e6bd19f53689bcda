//! Stand-in for the fork guard: no process forks here.

#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnerProcess;

impl OwnerProcess {
    pub(crate) fn current() -> OwnerProcess {
        OwnerProcess
    }

    pub(crate) fn is_current(&self) -> bool {
        true
    }
}

#[derive(Debug)]
pub(crate) struct CloseOnForkFd;
