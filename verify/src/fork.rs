//! Stands for what knows of forks: nobody forks here.

#[derive(Debug, Clone, Copy)]
pub(crate) struct Home;

impl Home {
    pub(crate) fn here() -> Home {
        Home
    }

    pub(crate) fn is_here(&self) -> bool {
        true
    }
}

#[derive(Debug)]
pub(crate) struct PrivateFd;
