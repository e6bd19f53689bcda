//! The Zenoh session of a bridge: its configuration, its inbox and its presence.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use zenoh::bytes::ZBytes;
use zenoh::liveliness::LivelinessToken;
use zenoh::pubsub::{Publisher, Subscriber};
use zenoh::qos::CongestionControl;
use zenoh::sample::{Sample, SampleKind};
use zenoh::{Config, Session, Wait};

use crate::error::{Error, Result};
use crate::message::{Id, Message, VERSION, hex, id_of};
use crate::options::Options;

/// The longest that Zenoh waits to send a message, a part at most, before it closes the link. Credits
/// keep a receiver from being the cause, so this is about links that carry nothing. A link that has
/// ended is cleared away behind a message that waits, so it is no longer than the link's timeout,
/// except as a slow link needs for a part.
fn send_timeout(options: &Options) -> Duration {
    let (shortest, longest) = (Duration::from_secs(10), Duration::from_secs(60));
    options.link_timeout.clamp(shortest, longest)
}

/// Buffers that a link keeps for what it receives: those of a few parts.
const RECEIVE_BYTES: usize = 4 << 20;
/// More than any message: a part and its attachment.
const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// What comes in, on Zenoh's own threads: none of the functions may wait.
pub(crate) trait Events: Send + Sync + 'static {
    fn presence(&self, bridge: Id, is_present: bool);
    /// That bridge is among those that were asked for with [`Presence::ask`].
    fn found(&self, bridge: Id);
    fn received(&self, sample: &Sample);
}

/// The parts that keep a bridge present.
pub(crate) struct Presence {
    pub(crate) session: Session,
    _inbox: Subscriber<()>,
    _token: LivelinessToken,
    _others: Subscriber<()>,
    events: Arc<dyn Events>,
}

/// Opens the session of a bridge.
pub(crate) fn open(options: &Options) -> Result<Session> {
    let session = zenoh::open(config(options)?).wait();
    session.map_err(|error| Error::zenoh("open its session", error))
}

/// The id of a bridge is that of its session: random, and new with each session.
pub(crate) fn id(session: &Session) -> Id {
    session.zid().to_le_bytes()
}

/// Messages to one bridge that may wait in its outbox: more only if it reads nothing.
const POSTED_MAX: usize = 256;

/// The messages to one bridge.
#[derive(Debug)]
pub(crate) struct Outbox {
    me: Id,
    publisher: Arc<Publisher<'static>>,
    posted: SyncSender<Posted>,
}

#[derive(Debug)]
enum Posted {
    Message(Message),
    /// Says that all before it was sent.
    Flush(SyncSender<()>),
}

impl Presence {
    /// Shows this bridge to the others.
    pub(crate) fn new(session: Session, me: Id, events: Arc<dyn Events>) -> Result<Presence> {
        let inbox = {
            let events = events.clone();
            let inbox = session.declare_subscriber(inbox_key(&me));
            inbox
                .callback(move |sample| events.received(&sample))
                .wait()
        };
        let inbox = inbox.map_err(|error| Error::zenoh("open an inbox", error))?;
        // After the inbox: a bridge that sees the token can send.
        let token = session
            .liveliness()
            .declare_token(presence_key(&hex(&me)))
            .wait();
        let token = token.map_err(|error| Error::zenoh("declare its presence", error))?;
        let others = session.liveliness().declare_subscriber(presence_key("*"));
        let told = events.clone();
        let others = others.history(true).callback(move |sample| {
            if let Some(id) = bridge_of(&sample) {
                told.presence(id, sample.kind() == SampleKind::Put);
            }
        });
        let others = others.wait();
        let others = others.map_err(|error| Error::zenoh("watch for bridges", error))?;
        Ok(Presence {
            session,
            _inbox: inbox,
            _token: token,
            _others: others,
            events,
        })
    }

    /// The sessions that are connected now. It waits for locks of Zenoh.
    pub(crate) fn connected(&self) -> HashSet<Id> {
        let peers = self.session.info().peers_zid().wait();
        peers.map(|peer| peer.to_le_bytes()).collect()
    }

    /// Asks Zenoh for all tokens again.
    pub(crate) fn ask(&self) {
        let events = self.events.clone();
        let liveliness = self.session.liveliness();
        let asked = liveliness.get(presence_key("*")).callback(move |reply| {
            if let Some(id) = reply.result().ok().and_then(bridge_of) {
                events.found(id);
            }
        });
        // Only a session that is closed answers nothing.
        let _ = asked.wait();
    }

    /// An outbox for messages to `bridge`.
    pub(crate) fn outbox(&self, me: Id, bridge: &Id) -> Result<Outbox> {
        let publisher = self.session.declare_publisher(inbox_key(bridge));
        // All messages have one priority, so they come in the order in which they are sent.
        let publisher = publisher
            .congestion_control(CongestionControl::Block)
            .wait();
        let publisher = publisher.map_err(|error| Error::zenoh("open an outbox", error))?;
        let publisher = Arc::new(publisher);
        let (posted, waiting) = sync_channel(POSTED_MAX);
        let sends = publisher.clone();
        let thread = std::thread::Builder::new().name("bridge-post".into());
        let thread = thread.spawn(move || send_posted(&waiting, &sends, &me));
        thread.map_err(|source| Error::Thread {
            purpose: "an outbox",
            source,
        })?;
        Ok(Outbox {
            me,
            publisher,
            posted,
        })
    }
}

impl Outbox {
    /// Sends a message, and waits while the link takes none. Whether it arrives, only an answer
    /// says; an error is that of a closed session.
    pub(crate) fn send(&self, message: &Message, payload: impl Into<ZBytes>) -> Result<()> {
        put(&self.publisher, &self.me, message, payload.into())
    }

    /// Sends a message soon, and does not wait: for threads that serve other peers too. False if
    /// too many wait already.
    pub(crate) fn post(&self, message: Message) -> bool {
        self.posted.try_send(Posted::Message(message)).is_ok()
    }

    /// Waits until what was posted is sent, at the latest until `deadline`.
    pub(crate) fn flush(&self, deadline: Instant) {
        let (sender, sent) = sync_channel(1);
        if self.posted.try_send(Posted::Flush(sender)).is_ok() {
            let _ = sent.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// A session that is connected to nobody, with an outbox.
#[cfg(test)]
pub(crate) fn alone(options: &Options) -> (Session, Arc<Outbox>) {
    let session = open(options).unwrap();
    let publisher = session.declare_publisher(inbox_key(&[1; 16]));
    let (posted, _) = sync_channel(1);
    let outbox = Outbox {
        me: id(&session),
        publisher: Arc::new(publisher.wait().unwrap()),
        posted,
    };
    (session, Arc::new(outbox))
}

/// Sends what is posted, until the outbox is dropped.
fn send_posted(waiting: &Receiver<Posted>, publisher: &Publisher<'static>, me: &Id) {
    while let Ok(posted) = waiting.recv() {
        match posted {
            Posted::Message(message) => drop(put(publisher, me, &message, ZBytes::new())),
            Posted::Flush(sent) => drop(sent.try_send(())),
        }
    }
}

fn put(publisher: &Publisher<'static>, me: &Id, message: &Message, payload: ZBytes) -> Result<()> {
    let put = publisher.put(payload).attachment(message.encode(me));
    put.wait().map_err(|error| Error::zenoh("send", error))
}

/// No wildcard matches a part that begins with @: a peer that subscribes to everything gets the
/// messages to no other.
fn inbox_key(bridge: &Id) -> String {
    format!("warpipe/{VERSION}/inbox/@{}", hex(bridge))
}

/// The bridge of a token.
fn bridge_of(token: &Sample) -> Option<Id> {
    token.key_expr().as_str().rsplit('/').next().and_then(id_of)
}

fn presence_key(bridge: &str) -> String {
    format!("warpipe/{VERSION}/bridge/{bridge}")
}

fn config(options: &Options) -> Result<Config> {
    let mut config = Config::default();
    let mut set = |key: &str, value: String| {
        let set = config.insert_json5(key, &value);
        set.map_err(|error| Error::zenoh("take its configuration", format!("{key}: {error}")))
    };
    set("mode", "\"peer\"".into())?;
    set("listen/endpoints", list(&options.listen))?;
    set("connect/endpoints", list(&options.connect))?;
    // A peer that is not there yet is tried again, and one that was lost.
    set("connect/exit_on_failure", "false".into())?;
    set("connect/timeout_ms", "-1".into())?;
    let retry = "{ period_init_ms: 100, period_max_ms: 2000, period_increase_factor: 2 }";
    set("connect/retry", retry.into())?;
    // Only the endpoints that were named.
    set("scouting/multicast/enabled", "false".into())?;
    set("scouting/gossip/enabled", "false".into())?;
    // No client and no router: a client is told of the others, and reaches them through here; a
    // router is a peer's gateway, and is told of all its publishers' keys, the others' inboxes.
    set(
        "gateway",
        "{ south: [{ filters: [{ modes: [\"router\"] }] }] }".into(),
    )?;
    set(
        "transport/unicast/max_sessions",
        options.peers_max.to_string(),
    )?;
    set(
        "transport/link/tx/lease",
        options.link_timeout.as_millis().to_string(),
    )?;
    set("transport/link/tx/queue/size/data", "16".into())?;
    // A part waits in its buffers until it lies in its slot: with fewer of them Zenoh allocates and
    // clears one for each 64 KiB.
    set("transport/link/rx/buffer_size", RECEIVE_BYTES.to_string())?;
    let wait = "transport/link/tx/queue/congestion_control/block/wait_before_close";
    set(wait, send_timeout(options).as_micros().to_string())?;
    set(
        "transport/link/rx/max_message_size",
        MESSAGE_BYTES_MAX.to_string(),
    )?;
    let tls = &options.tls;
    if let Some(authority) = &tls.authority {
        set("transport/link/tls/root_ca_certificate", text(authority))?;
        set("transport/link/tls/enable_mtls", "true".into())?;
    }
    for side in ["listen", "connect"] {
        if let (Some(certificate), Some(key)) = (&tls.certificate, &tls.key) {
            set(
                &format!("transport/link/tls/{side}_certificate"),
                text(certificate),
            )?;
            set(&format!("transport/link/tls/{side}_private_key"), text(key))?;
        }
    }
    Ok(config)
}

fn list(endpoints: &[String]) -> String {
    let quoted: Vec<String> = endpoints.iter().map(|one| quoted(one)).collect();
    format!("[{}]", quoted.join(","))
}

fn text(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

/// As a string of JSON.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04x}", c as u32)),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
