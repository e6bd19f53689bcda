//! Events for the crate `tracing`: what becomes of names, connections, subscribers and jobs.
//!
//! A `tracing` subscriber is foreign code: it may block, panic, or call this library. So an event
//! is put into a queue, which no other lock is needed for, and a thread gives it to the global
//! subscriber. The queue has a limit; beyond it events are counted and dropped. Nothing here is
//! called for each item of a channel or queue. Without the feature `tracing`, and without a global
//! subscriber that wants an event's level, an event costs a load.

#[cfg(feature = "tracing")]
mod queue;
#[cfg(test)]
mod tests;

/// Defines the events: name, level and fields of each, as [observe.md] lists them.
///
/// [observe.md]: https://docs.rs/warpipe
macro_rules! events {
    ($($(#[$doc:meta])* $variant:ident { $($field:ident: $type:ty),* } => $level:ident $name:literal;)*) => {
        /// An event. Its fields are copies, in the order of the list, so that it outlives what it
        /// is about.
        #[derive(Debug)]
        #[cfg_attr(not(feature = "tracing"), allow(dead_code))]
        pub(crate) enum TraceEvent {
            $($(#[$doc])* $variant($($type),*),)*
        }

        #[cfg(feature = "tracing")]
        impl TraceEvent {
            fn level(&self) -> tracing::Level {
                match self {
                    $(TraceEvent::$variant { .. } => tracing::Level::$level,)*
                }
            }

            /// Gives the event to the subscriber of this thread.
            fn give(&self) {
                match self {
                    $(TraceEvent::$variant($($field),*) => tracing::event!(
                        name: $name,
                        target: "warpipe",
                        tracing::Level::$level,
                        $($field = $field),*
                    ),)*
                }
            }

            /// Each event's level, name and fields.
            #[cfg(test)]
            const ALL: &'static [(&'static str, &'static str, &'static [&'static str])] =
                &[$((stringify!($level), $name, &[$(stringify!($field)),*]),)*];
        }
    };
}

events! {
    /// This process serves a name.
    EndpointOpened { name: String, kind: String } => INFO "endpoint.opened";
    /// This process has withdrawn a name.
    EndpointClosed { name: String, kind: String } => INFO "endpoint.closed";
    /// Others have removed the files of a name that this process serves: no new client finds it.
    NameVanished { name: String } => WARN "name.vanished";
    /// They are back.
    NameRestored { name: String } => WARN "name.restored";
    /// A connection was refused before it counted as a client.
    ConnectionRefused { name: String, uid: u32, pid: i32, reason: String } => WARN "connection.refused";
    /// A client was admitted.
    ClientConnected { name: String, client: u64, uid: u32 } => DEBUG "client.connected";
    /// A client has ended its session.
    ClientClosed { name: String, client: u64, uid: u32 } => DEBUG "client.closed";
    /// A client's connection has ended, it holds something, and its death is not proven.
    ClientSuspect { name: String, client: u64, uid: u32 } => WARN "client.suspect";
    /// A client's process is proven dead; what it held comes back.
    ClientDied { name: String, client: u64, uid: u32 } => WARN "client.died";
    /// A subscriber gets samples from here on.
    SubscriberAttached { name: String, subscriber: u64, pid: i32, uid: u32 } => DEBUG "subscriber.attached";
    /// A subscriber leaves, and holds samples until it has released them.
    SubscriberLeft { name: String, subscriber: u64, pid: i32, reason: String } => DEBUG "subscriber.left";
    /// A subscriber's connection has ended without a close, and its death is not proven.
    SubscriberSuspect { name: String, subscriber: u64, pid: i32 } => WARN "subscriber.suspect";
    /// A subscriber gave no sign of life for as long as the publisher allows.
    SubscriberEvicted { name: String, subscriber: u64, pid: i32, silent_ms: u64 } => WARN "subscriber.evicted";
    /// A subscriber's process is proven dead; the slots that it held come back.
    SubscriberDied { name: String, subscriber: u64, pid: i32 } => WARN "subscriber.died";
    /// The owner of a name that this process uses has closed it.
    OwnerClosed { name: String, pid: i32 } => INFO "owner.closed";
    /// The owner of a name that this process uses is dead.
    OwnerDied { name: String, pid: i32 } => WARN "owner.died";
    /// The keeper offers a version of weights.
    WeightsOffered { name: String, version: u64, bytes: u64 } => INFO "weights.offered";
    /// Events that the queue had no room for.
    EventsDropped { count: u64 } => ERROR "events.dropped";
}

/// Has a thread give the event to the global subscriber, if that wants its level. May be called
/// under any lock.
#[cfg(feature = "tracing")]
pub(crate) fn emit(event: impl FnOnce() -> TraceEvent) {
    if queue::is_wanted() {
        queue::push(event());
    }
}

/// Without the feature `tracing` there are no events.
#[cfg(not(feature = "tracing"))]
pub(crate) fn emit(_: impl FnOnce() -> TraceEvent) {}
