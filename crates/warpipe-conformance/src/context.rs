//! The arguments of a case.

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;
use warpipe::{
    Client, Device, Domain, Event, Publisher, Queue, QueueOptions, Server, Stream, Subscriber,
    Worker, WorkerOptions,
};
use warpipe_testkit::{Rng, eventually, pick};

use crate::PATIENCE;
use crate::guard::Guard;
use crate::payload::{ErrorCounters, Payload};
use crate::peer::{ORPHAN, Order, Peer};
use crate::process;

/// The backend that is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Backend {
    /// Memfds and threads.
    Host,
    /// A GPU, or the fake driver.
    Cuda,
}

impl Backend {
    /// Its name, as the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Host => "host",
            Backend::Cuda => "cuda",
        }
    }

    /// Opens its device of this number.
    ///
    /// # Errors
    /// Those of [`Device::cuda`].
    pub fn open(self, ordinal: u32) -> warpipe::Result<Device> {
        match self {
            Backend::Host => Ok(Device::host()),
            Backend::Cuda => Device::cuda(ordinal),
        }
    }
}

/// How a run was asked for.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The backend.
    pub backend: Backend,
    /// How many devices the cases may use.
    pub devices: u32,
    /// Many more kills and rounds.
    pub long: bool,
    /// How many kills a storm has, if that was asked for.
    pub kills: Option<u32>,
    /// How many seconds a storm's survivors wait, if that was asked for.
    pub patience: Option<u64>,
    /// The GPU is shared through MPS.
    pub mps: bool,
    /// Decides all chance.
    pub seed: u64,
}

/// One case's surroundings.
#[derive(Debug)]
pub struct Context {
    /// How the run was asked for.
    pub settings: Settings,
    /// The device.
    pub device: Device,
    /// A domain of this case alone.
    pub domain: Domain,
    figures: Mutex<BTreeMap<String, Value>>,
}

impl Context {
    /// Opens the device with this number and the case's domain.
    ///
    /// # Errors
    /// Those of the device, or of making the domain.
    pub fn open(settings: Settings, folder: &Path, ordinal: u32) -> Result<Context> {
        let device = settings
            .backend
            .open(ordinal)
            .context("opening the device")?;
        warpipe_kernels::preload(&device)?;
        let domain = Domain::at(folder.join("domain"))?;
        Ok(Context {
            settings,
            device,
            domain,
            figures: Mutex::default(),
        })
    }

    /// The same context, with figures of its own, for a longer-lived owner.
    pub fn twin(&self) -> Context {
        let Context {
            settings,
            device,
            domain,
            ..
        } = self;
        Context {
            settings: settings.clone(),
            device: device.clone(),
            domain: domain.clone(),
            figures: Mutex::default(),
        }
    }

    /// Surroundings with a domain of their own, and peers in it: for parts of a case that shall not
    /// see each other.
    ///
    /// # Errors
    /// Those of making the domain.
    pub fn apart(&self, name: &str) -> Result<Context> {
        let folder = self.folder().join(name);
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .context("making a folder")?;
        Context::open(self.settings.clone(), &folder, 0)
    }

    /// Makes everything that stays for the process's life, so that a guard sees only what a case
    /// does: the watcher, the driver's first export, its first launch.
    ///
    /// # Errors
    /// Those of a first hand-over.
    pub fn warm_up(&self) -> Result<()> {
        let folder = self
            .folder()
            .join(format!("warm-up-{}", std::process::id()));
        let domain = Domain::at(&folder)?;
        let publisher = Publisher::new("warm-up", domain.on(&self.device))?;
        let mut subscriber = Subscriber::open("warm-up", domain.on(&self.device), Duration::ZERO)?;
        let stream = self.stream()?;
        Payload::of(64, 1).send(&publisher, &stream)?;
        let wrong =
            ErrorCounters::new(&self.device)?.finish(subscriber.receive(&stream, PATIENCE)?)?;
        anyhow::ensure!(wrong == 0, "{wrong} wrong words in the warm-up");
        // The driver opens a file for the first interprocess event, and keeps it.
        drop(Event::new(domain.on(&self.device))?);
        drop((publisher, subscriber, stream, domain));
        std::fs::remove_dir_all(folder).context("removing the warm-up's domain")?;
        let is_idle = || self.device.backend().bytes_held() == 0 && !crate::guard::has_streams();
        anyhow::ensure!(
            eventually(PATIENCE, is_idle),
            "the warm-up's memory did not come back"
        );
        Ok(())
    }

    /// A publisher of this case's domain and device.
    ///
    /// # Errors
    /// Those of [`Publisher::new`].
    pub fn publisher(&self, name: &str) -> warpipe::Result<Publisher> {
        Publisher::new(name, self.domain.on(&self.device))
    }

    /// A subscriber of this case's domain and device.
    ///
    /// # Errors
    /// Those of [`Subscriber::open`].
    pub fn subscriber(&self, name: &str) -> warpipe::Result<Subscriber> {
        Subscriber::open(name, self.domain.on(&self.device), Duration::ZERO)
    }

    /// A queue of this case's domain and device.
    ///
    /// # Errors
    /// Those of [`Queue::new`].
    pub fn queue(&self, name: &str) -> warpipe::Result<Queue> {
        Queue::new(name, self.queue_options())
    }

    /// The options of a queue of this case's domain and device.
    pub fn queue_options(&self) -> QueueOptions {
        QueueOptions {
            submit_timeout: PATIENCE,
            ..self.domain.on(&self.device)
        }
    }

    /// A worker of this case's domain and device.
    ///
    /// # Errors
    /// Those of [`Worker::open`].
    pub fn worker(&self, queue: &str) -> warpipe::Result<Worker> {
        Worker::open(queue, self.worker_options(), Duration::ZERO)
    }

    /// The options of a worker of this case's domain and device.
    pub fn worker_options(&self) -> WorkerOptions {
        WorkerOptions {
            answer_timeout: PATIENCE,
            ..self.domain.on(&self.device)
        }
    }

    /// A client of this case's domain and device.
    ///
    /// # Errors
    /// Those of [`Client::new`].
    pub fn client(&self, service: &str) -> warpipe::Result<Client> {
        Client::new(service, self.domain.on(&self.device))
    }

    /// A server of this case's domain and device.
    ///
    /// # Errors
    /// Those of [`Server::new`].
    pub fn server(&self, service: &str) -> warpipe::Result<Server> {
        Server::new(service, self.domain.on(&self.device))
    }

    /// A new stream.
    ///
    /// # Errors
    /// Those of the device.
    pub fn stream(&self) -> warpipe::Result<Stream> {
        self.device.stream()
    }

    /// A tally for the checks of received samples.
    ///
    /// # Errors
    /// Those of registering memory.
    pub fn error_counters(&self) -> warpipe::Result<ErrorCounters> {
        ErrorCounters::new(&self.device)
    }

    /// A further process, on the same device.
    ///
    /// # Errors
    /// It does not start.
    pub fn peer(&self) -> Result<Peer> {
        self.peer_on(0)
    }

    /// A further process, on the device with this number.
    ///
    /// # Errors
    /// It does not start.
    pub fn peer_on(&self, ordinal: u32) -> Result<Peer> {
        Peer::start(&self.settings, self.folder(), ordinal)
    }

    /// A further process that is going to be killed. One of three forks a child within 30 ms, if it
    /// lives so long; the child lives up to 200 ms longer than it, and every second one holds all
    /// that its parent held.
    ///
    /// # Errors
    /// It does not start.
    pub fn mortal(&self, rng: &mut Rng) -> Result<Peer> {
        let mut peer = self.peer()?;
        if rng.u64(..3) == 0 {
            let (latest, longest) = (*pick(rng, &[1, 3_000, 30_000]), *pick(rng, &[1, 20, 200]));
            let (in_us, after_ms) = (rng.u64(..latest), rng.u64(..longest));
            peer.ask(&Order::Orphan {
                in_us,
                after_ms,
                unseen: rng.bool(),
            })?;
        }
        Ok(peer)
    }

    /// Waits until no orphan of a [mortal](Self::mortal) lives.
    ///
    /// # Errors
    /// One lives on.
    pub fn orphans_end(&self) -> Result<()> {
        let is_orphan = |process: &i32| {
            std::fs::read_to_string(format!("/proc/{process}/comm"))
                .is_ok_and(|name| name.trim() == ORPHAN)
        };
        let group = rustix::process::getpgrp();
        let none = || !process::group_members(group).iter().any(is_orphan);
        anyhow::ensure!(eventually(PATIENCE, none), "an orphan lives on");
        Ok(())
    }

    /// Figures of a storm: how many processes were killed, and how many of them had forked a child.
    ///
    /// # Errors
    /// An orphan lives on.
    pub fn figure_storm(&self, kills: impl Into<Value>) -> Result<()> {
        self.orphans_end()?;
        self.figure("kills", kills);
        self.figure(
            "orphans",
            std::fs::metadata(self.orphans_path()).map_or(0, |file| file.len()),
        );
        Ok(())
    }

    /// The file into which each orphan writes a byte.
    pub(crate) fn orphans_path(&self) -> PathBuf {
        self.folder().join("orphans")
    }

    fn folder(&self) -> PathBuf {
        self.domain
            .path()
            .parent()
            .map(Path::to_path_buf)
            .unwrap_or_default()
    }

    /// Counts what is there now.
    pub fn guard(&self) -> Guard {
        Guard::take(&self.device, &self.domain)
    }

    /// Chance, decided by the run's seed.
    pub fn rng(&self) -> Rng {
        Rng::with_seed(self.settings.seed)
    }

    /// `short` rounds, or in the long mode as many as the backend bears.
    pub fn rounds(&self, short: u32, long_host: u32, long_cuda: u32) -> u32 {
        match (self.settings.long, self.settings.backend) {
            (false, _) => short,
            (true, Backend::Host) => long_host,
            (true, Backend::Cuda) => long_cuda,
        }
    }

    /// The kills of a storm: as many as were asked for, or as [`rounds`](Self::rounds).
    pub fn kills(&self, short: u32, long_host: u32, long_cuda: u32) -> u32 {
        self.settings
            .kills
            .unwrap_or_else(|| self.rounds(short, long_host, long_cuda))
    }

    /// How long a storm's survivor waits for what is to come before it asks again: either shorter
    /// than any wait inside the library, or longer, at random.
    pub fn wait(&self, rng: &mut Rng) -> Duration {
        let long = self.settings.patience.map_or(PATIENCE, Duration::from_secs);
        if rng.bool() {
            Duration::from_millis(20)
        } else {
            long
        }
    }

    /// A figure for the report.
    pub fn figure(&self, key: &str, value: impl Into<Value>) {
        self.figures
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key.to_string(), value.into());
    }

    /// Percentiles of durations, in microseconds, for the report.
    pub fn figure_times(&self, key: &str, times: &mut [Duration]) {
        times.sort_unstable();
        let at = |share: f64| {
            times
                .get(((times.len() as f64 - 1.0) * share).round() as usize)
                .copied()
        };
        for (name, share) in [("p50", 0.5), ("p90", 0.9), ("max", 1.0)] {
            if let Some(time) = at(share) {
                self.figure(&format!("{key}_{name}_us"), time.as_nanos() as f64 / 1e3);
            }
        }
    }

    /// All figures so far.
    pub fn take_figures(&self) -> BTreeMap<String, Value> {
        std::mem::take(&mut *self.figures.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
