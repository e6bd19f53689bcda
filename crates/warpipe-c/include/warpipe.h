/* warpipe: GPU memory and streams of tensors handed between processes without a copy, surviving the
 * death of any of them.
 *
 * Made by cargo xtask c header; do not edit.
 *
 * Every function that can fail returns a warpipe_status; warpipe_error_message() says more.
 *
 * Ownership. A function that gives an object to the caller says how it ends: warpipe_close ends every
 * object, and its type says what that means; closing null does nothing. A pointer that is null, was
 * closed, or is of another type is refused with WARPIPE_INVALID_OBJECT: the library never reads
 * memory at such a pointer. An output pointer is null unless the call succeeds. Texts and arrays are
 * copied during the call unless it says otherwise. An object that the program leaves open ends with
 * the process, and its peers see that.
 *
 * Threads. Every function may be called on any thread. A warpipe_subscriber, warpipe_worker,
 * warpipe_server, warpipe_sample, warpipe_loan or warpipe_lease is for one thread at
 * a time: a second one gets WARPIPE_INVALID_STATE. All others may be used by any number of threads
 * at once. warpipe_close may be called while another thread is in a call on the object, which ends
 * when that call does; every other end of an object is refused then, and it stays open.
 * The library calls no function of the caller but those that a call was given (release, deleters,
 * that of warpipe_stream_call), and holds no lock then.
 *
 * Streams are CUstream or cudaStream_t as they are (void *), of the device's primary context; null
 * is the default stream. Device addresses are uint64_t. Sizes are in bytes, times in nanoseconds.
 * A timeout of 0 does not wait; UINT64_MAX waits for 584 years. Sends, submissions and answers take
 * WARPIPE_USUAL_TIMEOUT, too: as long as the options of their endpoint say.
 *
 * A signal's handler runs while a call waits, and the call goes on: take short timeouts to look at
 * flags that a handler sets. A child of fork() may not use its parent's objects or streams
 * (WARPIPE_INVALID_STATE, WARPIPE_INVALID_INPUT); the host device may be opened anew there. Functions
 * of atexit, static destructors and destructors of thread-local values may call this library, but
 * the message of an error may be empty there.
 *
 * License: MIT OR Apache-2.0
 */

#ifndef WARPIPE_H
#define WARPIPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct DLManagedTensor;
struct DLManagedTensorVersioned;

// As a timeout: the one of the endpoint's options, or of its policy.
#define WARPIPE_USUAL_TIMEOUT 9223372036854775806

// The most bytes of an endpoint's name, without the zero at its end.
#define WARPIPE_NAME_BYTES_MAX 80

// The most dimensions that a tensor may have.
#define WARPIPE_RANK_MAX 8

// The most bytes of a member's role, without the zero at its end.
#define WARPIPE_ROLE_BYTES_MAX 64

// The longest name of a part, in bytes.
#define WARPIPE_PART_NAME_BYTES_MAX 128

// The largest value that can be signalled or waited for, 2^63 - 2.
#define WARPIPE_TIMELINE_VALUE_MAX 9223372036854775806

// The header's major version. A library of another one is refused.
#define WARPIPE_VERSION_MAJOR 0

// The header's minor version. While the major version is 0, a library of another one is refused;
// later, an older one.
#define WARPIPE_VERSION_MINOR 1

// The result of a call. Every function that can fail returns one; warpipe_error_message says
// more.
typedef enum {
  // The call did what it says.
  WARPIPE_OK = 0,
  // No usable device: use another one or the host device, or mend the installation.
  WARPIPE_DEVICE_UNAVAILABLE = 1,
  // A device or its driver failed, or cannot do what was asked. Open the device again, or end
  // the process: work that was under way may not be complete.
  WARPIPE_DEVICE_FAILED = 2,
  // The operating system, a directory or a library of the system is not as it must be.
  WARPIPE_SYSTEM = 3,
  // A limit is reached. Release something, wait, or raise the limit.
  WARPIPE_LIMIT_REACHED = 4,
  // Nothing has this name or number now. Wait for it, or look for another one.
  WARPIPE_NOT_FOUND = 5,
  // Something else has this name. Take another name.
  WARPIPE_NAME_CONFLICT = 6,
  // The other side does not permit this. Trying again does not help.
  WARPIPE_REFUSED = 7,
  // The two sides do not speak the same protocol, or the peer broke it. Run one version.
  WARPIPE_PROTOCOL = 8,
  // The peer closed or died. Open the endpoint again when it is back.
  WARPIPE_PEER_GONE = 9,
  // This link has ended; its peer may be alive. Connect again.
  WARPIPE_LINK_CLOSED = 10,
  // The writer of some data was lost before the data was complete. Discard what was computed
  // from it.
  WARPIPE_DATA_LOST = 11,
  // A wait or a deadline has passed. Wait again, or look at the peer's state.
  WARPIPE_TIMEOUT = 12,
  // A job or request came to no result.
  WARPIPE_JOB_FAILED = 13,
  // An argument, name, layout, ticket or handle is not valid. Correct the caller.
  WARPIPE_INVALID_INPUT = 14,
  // The object cannot do this in its present state, or another thread uses it. Correct the order
  // of the calls.
  WARPIPE_INVALID_STATE = 15,
  // The object is closed, or the pointer was never one of this type.
  WARPIPE_INVALID_OBJECT = 16,
  // A fault of this library. Report it with its message.
  WARPIPE_INTERNAL = 17,
} warpipe_status;

// How memory may be used.
typedef enum {
  // For reading. The MMU enforces it against mistakes; a hostile importer can map the memory
  // writable. Send a copy instead.
  WARPIPE_ACCESS_READ = 0,
  // For reading and writing.
  WARPIPE_ACCESS_READ_WRITE = 1,
} warpipe_access;

// The kinds of changes of a member's state.
typedef enum {
  // A change that this version does not know.
  WARPIPE_CHANGE_OTHER = 0,
  // It has joined. The members that were present when the watch began come first.
  WARPIPE_CHANGE_JOINED = 1,
  // Its signs of life have stopped for a second. It may recover at any moment.
  WARPIPE_CHANGE_STALLED = 2,
  // It gives signs of life again.
  WARPIPE_CHANGE_RECOVERED = 3,
  // It has closed gracefully. Its process may be alive.
  WARPIPE_CHANGE_LEFT = 4,
  // Its process is proven dead. Its names are free: its files in the domain are removed next.
  WARPIPE_CHANGE_DIED = 5,
} warpipe_change_kind;

// An element type: DLPack's type code times 256, plus the width of an element in bits.
typedef enum {
  // int8_t.
  WARPIPE_INT8 = 8,
  // int16_t.
  WARPIPE_INT16 = 16,
  // int32_t.
  WARPIPE_INT32 = 32,
  // int64_t.
  WARPIPE_INT64 = 64,
  // uint8_t.
  WARPIPE_UINT8 = 264,
  // uint16_t.
  WARPIPE_UINT16 = 272,
  // uint32_t.
  WARPIPE_UINT32 = 288,
  // uint64_t.
  WARPIPE_UINT64 = 320,
  // __half.
  WARPIPE_FLOAT16 = 528,
  // float.
  WARPIPE_FLOAT32 = 544,
  // double.
  WARPIPE_FLOAT64 = 576,
  // __nv_bfloat16.
  WARPIPE_BFLOAT16 = 1040,
  // Two __half.
  WARPIPE_COMPLEX32 = 1312,
  // Two float.
  WARPIPE_COMPLEX64 = 1344,
  // Two double.
  WARPIPE_COMPLEX128 = 1408,
  // One byte, 0 or 1.
  WARPIPE_BOOL = 1544,
  // 3 bits of exponent, 4 of mantissa.
  WARPIPE_FLOAT8_E3M4 = 1800,
  // 4 bits of exponent, 3 of mantissa.
  WARPIPE_FLOAT8_E4M3 = 2056,
  // As before, with a bias of 11, finite, and without a negative zero.
  WARPIPE_FLOAT8_E4M3B11FNUZ = 2312,
  // 4 bits of exponent, 3 of mantissa, finite.
  WARPIPE_FLOAT8_E4M3FN = 2568,
  // As before, without a negative zero.
  WARPIPE_FLOAT8_E4M3FNUZ = 2824,
  // 5 bits of exponent, 2 of mantissa.
  WARPIPE_FLOAT8_E5M2 = 3080,
  // As before, finite, and without a negative zero.
  WARPIPE_FLOAT8_E5M2FNUZ = 3336,
  // 8 bits of exponent, and no sign.
  WARPIPE_FLOAT8_E8M0FNU = 3592,
  // Two values of 2 bits of exponent and 1 of mantissa, finite: one element of a byte, so
  // lengths and strides count pairs. DLPack's 4 bits and 2 lanes.
  WARPIPE_FLOAT4_E2M1FN_X2 = 4360,
} warpipe_dtype;

// The state of a peer.
typedef enum {
  // There is no such peer now.
  WARPIPE_PEER_NONE = 0,
  // It gives signs of life.
  WARPIPE_PEER_ALIVE = 1,
  // It has given none for a while: it may be stopped.
  WARPIPE_PEER_STALLED = 2,
  // It has said that it ends.
  WARPIPE_PEER_LEAVING = 3,
  // Its socket has ended; its death is not proven yet.
  WARPIPE_PEER_SUSPECT = 4,
  // Its death is proven.
  WARPIPE_PEER_DEAD = 5,
} warpipe_peer_state;

// The action when a subscriber holds as many samples as the publisher's depth.
typedef enum {
  // A send waits for room, then fails with WARPIPE_TIMEOUT, and no subscriber gets the sample.
  WARPIPE_POLICY_BLOCK = 0,
  // The subscriber loses the oldest sample that it has not received yet.
  WARPIPE_POLICY_DROP_OLDEST = 1,
  // The subscriber does not get this sample.
  WARPIPE_POLICY_DROP_NEWEST = 2,
  // A send fails at once with WARPIPE_LIMIT_REACHED, and no subscriber gets the sample.
  WARPIPE_POLICY_FAIL = 3,
} warpipe_policy;

// The order in which warpipe_queue_next_result gives results.
typedef enum {
  // In the order of submission.
  WARPIPE_ORDER_SUBMISSION = 0,
  // In the order of completion.
  WARPIPE_ORDER_COMPLETION = 1,
} warpipe_result_order;

// Opens what an allocation server of another process shares. Any number of threads may use it.
// What it has opened outlives it.
typedef struct warpipe_allocation_client warpipe_allocation_client;

// Shares memory that other code of this process has allocated. Any number of threads may use it.
// Closed, it releases its name and its shares.
typedef struct warpipe_allocation_server warpipe_allocation_server;

// Sends requests to the servers of a service. Any number of threads may use it. Closed, its
// requests are withdrawn; replies that were taken stay usable.
typedef struct warpipe_client warpipe_client;

// A GPU, or the host: memory of memfds, threads as streams. Endpoints that were made with it
// outlive it.
typedef struct warpipe_device warpipe_device;

// A directory of names. Endpoints meet by their name in one domain.
typedef struct warpipe_domain warpipe_domain;

// An event of this or another process. Any number of threads may use it. Closed, recordings that
// are enqueued still complete.
typedef struct warpipe_event warpipe_event;

// A job that was submitted to a queue, or a request that was sent to a service. Any number of
// threads may use it; one of them gets the result. A job outlives it: warpipe_queue_next_result
// gives the result, if that was not taken. A request ends with it, if its reply was not taken.
typedef struct warpipe_job warpipe_job;

// The answer that this process owes for a job of a queue or a request of a client. Closed without
// an answer, it is a failed attempt: another worker tries. The input is a sample of its own.
typedef struct warpipe_lease warpipe_lease;

// Memory on loan from a publisher, a queue, a client or a lease: for the caller to fill, on the
// device, then to send, to submit, or to answer with. Its contents are undefined at first. Closed,
// it returns unused, behind the work of the streams that it was written on or passed with; if the
// caller's own kernels may be writing it, discard it with their stream (warpipe_loan_discard)
// instead.
typedef struct warpipe_loan warpipe_loan;

// This process as a member of a domain. Any number of threads may use it. Closed, it leaves the
// domain.
typedef struct warpipe_member warpipe_member;

// The members of a domain, followed until this is closed. Any number of threads may use it.
typedef struct warpipe_members warpipe_members;

// A range of device memory: allocated by this process, opened by a ticket, a descriptor or a
// legacy CUDA IPC handle, or a block of a pool. Any number of threads may use it. Closed, it stays
// until the streams that it was used on are past their work; a block returns to its pool then.
// Memory that other processes have open, or that is published, stays theirs.
typedef struct warpipe_memory warpipe_memory;

// A permit of a semaphore. It returns when it is released or closed, or when its holder's death is
// proven. Closed, it is released behind the work of the stream that it was acquired on, or at once
// if it was acquired on the CPU.
typedef struct warpipe_permit warpipe_permit;

// Device memory that is handed out in blocks, to this process and to others. Any number of threads
// may use it. Closed, it releases its name, and clients get no more memory; blocks in use stay
// valid until they are closed.
typedef struct warpipe_pool warpipe_pool;

// A client of another process's pool. Any number of threads may use it. Its blocks outlive it.
typedef struct warpipe_pool_client warpipe_pool_client;

// Memory under a name, which other processes open by a ticket. Any number of threads may use it.
// Closed, it releases its name: no further process opens it, and those that have it open keep it.
typedef struct warpipe_published warpipe_published;

// Hands tensors in device memory to any number of subscribers. Any number of threads may use it.
// Closed, it ends gracefully: subscribers still receive the samples that are complete, and loans
// that were not sent can only be discarded.
typedef struct warpipe_publisher warpipe_publisher;

// Hands jobs to worker processes, each to one, and gets each one's result once. A job that a
// worker's death or failure leaves goes to another worker. Any number of threads may use it.
// Closed, its jobs end without an outcome, and its workers get WARPIPE_PEER_GONE; results that
// were taken stay usable, and a job's handle says WARPIPE_INVALID_STATE.
typedef struct warpipe_queue warpipe_queue;

// Says later whether the data of a released sample was complete.
typedef struct warpipe_receipt warpipe_receipt;

// A tensor in another process's memory, received from a channel, as the result of a job or a
// request, or as the input of one. Memory that this process may only read. Closed, it is released
// behind the work of the stream that it was received with.
typedef struct warpipe_sample warpipe_sample;

// A limited number of permits, held in any number of processes of one machine. Permits go to the
// thread that has waited longest. Any number of threads may use it. Closed by its maker, it ends
// when its permits are closed, too, and their streams are past their work: waits end with
// WARPIPE_PEER_GONE then.
typedef struct warpipe_semaphore warpipe_semaphore;

// Answers the requests of all clients of a service, together with its other servers. One thread at
// a time may use it; its leases may go to any thread. Closed, requests that it was sent and has
// not accepted go to other servers; its leases can still be answered.
typedef struct warpipe_server warpipe_server;

// Receives the tensors of one publisher. One thread at a time may use it; its samples may go to
// any thread. Samples that it has received outlive it.
typedef struct warpipe_subscriber warpipe_subscriber;

// A named 64-bit value that only grows, across processes: Vulkan's timeline semaphore. Any number
// of threads may use it. Closed by its maker, it ends: signals that are enqueued are still given,
// and waits for later values end with WARPIPE_PEER_GONE.
typedef struct warpipe_timeline warpipe_timeline;

// A descriptor of one event loop for a queue's or a client's results. Any number of threads may
// use it. Its descriptor ends with it.
typedef struct warpipe_watch warpipe_watch;

// Takes jobs of one queue. One thread at a time may use it; its leases may go to any thread.
// Closed, jobs that it was given and has not leased go to other workers, at no cost of an attempt;
// its leases can still be answered.
typedef struct warpipe_worker warpipe_worker;

// The users and groups that an endpoint admits, beside this process's own user. The domain's
// directory must admit them, too.
typedef struct {
  // User ids.
  const uint32_t *uids;
  // How many those are.
  size_t uids_count;
  // Group ids.
  const uint32_t *gids;
  // How many those are.
  size_t gids_count;
} warpipe_allow;

// Options of warpipe_timeline_create, warpipe_event_create, warpipe_semaphore_create and
// warpipe_allocation_server_create. Begin with {.size = sizeof(warpipe_create_options)}; a
// field that is 0 has its default.
typedef struct {
  // sizeof(warpipe_create_options).
  size_t size;
  // The domain in which other processes find it; the environment's by default.
  const warpipe_domain *domain;
  // The device of its streams; the first GPU by default, else the host.
  const warpipe_device *device;
  // Other users that are admitted; none by default. Each can write a semaphore's page: a wrong
  // one can take permits that are not its own, and let in more than the maximum.
  warpipe_allow allow;
} warpipe_create_options;

// Options of warpipe_timeline_open, warpipe_event_open, warpipe_semaphore_open,
// warpipe_pool_client_open and warpipe_allocation_client_open. Begin with
// {.size = sizeof(warpipe_open_options)}; a field that is 0 has its default.
typedef struct {
  // sizeof(warpipe_open_options).
  size_t size;
  // The domain of its name; the environment's by default.
  const warpipe_domain *domain;
  // The device to use it on; the first GPU by default, else the host.
  const warpipe_device *device;
  // How long to wait for an endpoint of this name, in nanoseconds; by default not at all:
  // WARPIPE_NOT_FOUND.
  uint64_t wait_ns;
} warpipe_open_options;

// Options of a publisher. Begin with {.size = sizeof(warpipe_publisher_options)}; a field that
// is 0 has its default.
typedef struct {
  // sizeof(warpipe_publisher_options).
  size_t size;
  // The domain of its name; the environment's by default.
  const warpipe_domain *domain;
  // The device that holds the samples; the first GPU by default, else the host.
  const warpipe_device *device;
  // How many samples each subscriber may have been given and not released: 1 to 4096; 16 by
  // default.
  uint32_t depth;
  // A warpipe_policy; to block, by default.
  uint32_t policy;
  // With WARPIPE_POLICY_BLOCK, how long a send waits, in nanoseconds; 5 s by default.
  uint64_t block_timeout_ns;
  // How many of the last samples a late subscriber gets first; none by default.
  uint32_t history;
  // The most subscribers at once, of which half may be of one other user, and a quarter, or 64,
  // in one other process; 256 by default.
  uint32_t subscribers_max;
  // The most device memory that the samples may take, in bytes; 4 GiB by default.
  uint64_t memory_limit;
  // How long a loan waits for memory that is in use, in nanoseconds; 5 s by default.
  uint64_t loan_timeout_ns;
  // Silence after which a subscriber loses its link, in nanoseconds, at least 500 ms; never by
  // default.
  uint64_t evict_after_ns;
  // How long a subscriber may take to attach, in nanoseconds; 5 s by default.
  uint64_t handshake_timeout_ns;
  // Other users that are admitted; none by default.
  warpipe_allow allow;
  // 1: samples say when they were sent and received; not by default.
  uint32_t timestamps;
} warpipe_publisher_options;

// The layout of a tensor in its memory.
typedef struct {
  // The element type, a warpipe_dtype.
  uint32_t dtype;
  // The number of dimensions, 0 to WARPIPE_RANK_MAX. With 0 it is one element.
  uint32_t rank;
  // The length of each dimension, in elements.
  uint64_t shape[WARPIPE_RANK_MAX];
  // The step of each dimension, in elements. May be negative.
  int64_t strides[WARPIPE_RANK_MAX];
  // Bytes from the memory's first byte to the element with all indices 0.
  uint64_t offset;
  // Bytes from the first to behind the last byte that the tensor, or its slot, takes.
  // Computed; ignored in an argument.
  uint64_t bytes;
} warpipe_layout;

// A function that the CPU runs in a stream's order.
typedef void (*warpipe_host_function)(void *argument);

// A subscriber, as its publisher sees it.
typedef struct {
  // Its process id.
  int32_t pid;
  // Its effective user id.
  uint32_t uid;
  // A warpipe_peer_state.
  uint32_t state;
  // Samples that it was given and has not released.
  uint32_t in_flight;
  // Nanoseconds since its last sign of life.
  uint64_t silent_for_ns;
  // Samples that it did not get because of its policy.
  uint64_t dropped;
} warpipe_subscriber_info;

// Options of a subscriber. Begin with {.size = sizeof(warpipe_subscriber_options)}; a field that
// is 0 has its default.
typedef struct {
  // sizeof(warpipe_subscriber_options).
  size_t size;
  // The domain of the publisher's name; the environment's by default.
  const warpipe_domain *domain;
  // The device to receive on; the first GPU by default, else the host.
  const warpipe_device *device;
  // How long to wait for a publisher of this name, in nanoseconds; by default not at all:
  // WARPIPE_NOT_FOUND.
  uint64_t wait_ns;
  // How long the publisher may take to answer, in nanoseconds; 5 s by default.
  uint64_t handshake_timeout_ns;
  // How long after a publisher's suspected death what is not complete is given up, where a child
  // of it keeps the proof back, in nanoseconds; 30 s by default.
  uint64_t orphan_timeout_ns;
  // How long a wait polls before it sleeps, in nanoseconds; 20 us by default.
  uint64_t spin_ns;
  // 1: attach to the next publisher of this name when one has gone; else receiving says
  // WARPIPE_PEER_GONE.
  uint32_t reconnect;
} warpipe_subscriber_options;

// A publisher, as its subscriber sees it.
typedef struct {
  // A warpipe_peer_state.
  uint32_t state;
  // Its process id; 0 while there is none.
  int32_t pid;
  // Samples that the subscriber did not get because of the publisher's policy.
  uint64_t dropped;
} warpipe_publisher_info;

// The properties of a device.
typedef struct {
  // 1 for a GPU, 0 for the host.
  bool is_cuda;
  // The device's ordinal in this process, as cudaSetDevice takes it; 0 for the host.
  uint32_t ordinal;
  // The GPU's UUID, the same in every process; zeros for the host.
  uint8_t uuid[16];
  // Total memory in bytes.
  uint64_t memory_bytes;
  // The name for people, cut off after 127 bytes: the GPU's product name, or host.
  char name[128];
} warpipe_device_info;

// An endpoint that warpipe_domain_list found.
typedef struct {
  // Its name.
  char name[81];
  // The process that owns it; 0 for one that a dead process left, and -1 for a living owner
  // of another PID namespace.
  int32_t pid;
  // What stands in the place of its files, if that is no endpoint's and keeps owners away: for
  // example a symlink. Empty if nothing does.
  char foreign[64];
} warpipe_endpoint;

// The memory of a loan.
typedef struct {
  // The device address of the element with all indices 0: a CUdeviceptr, or on the host an
  // address of this process.
  uint64_t data;
  // The device address of the first byte of layout.bytes.
  uint64_t slot;
  // The tensor's layout.
  warpipe_layout layout;
} warpipe_loan_info;

// Options of warpipe_member_create. Begin with {.size = sizeof(warpipe_member_options)}; a
// field that is 0 has its default.
typedef struct {
  // sizeof(warpipe_member_options).
  size_t size;
  // The domain to join; the environment's by default.
  const warpipe_domain *domain;
  // Tells people and programs the purpose of the process: up to WARPIPE_ROLE_BYTES_MAX bytes
  // without control characters; empty by default.
  const char *role;
  // Other users that are admitted; none by default.
  warpipe_allow allow;
} warpipe_member_options;

// Options of warpipe_members_open. Begin with {.size = sizeof(warpipe_members_options)}; a
// field that is 0 has its default.
typedef struct {
  // sizeof(warpipe_members_options).
  size_t size;
  // The domain to watch; the environment's by default.
  const warpipe_domain *domain;
  // 1 to leave the files of dead members' endpoints in the domain. By default they are removed,
  // each under its lock, so that no living process loses one.
  uint32_t keeps_files;
} warpipe_members_options;

// A member of a domain.
typedef struct {
  // The name that it joined under.
  char name[81];
  // The role that it declares; empty while it has not answered yet.
  char role[65];
  // Its process id, from the kernel; 0 if this PID namespace does not contain it.
  int32_t pid;
  // Its user id, from the kernel.
  uint32_t uid;
  // A warpipe_peer_state. In a change, WARPIPE_PEER_LEAVING says that it has left.
  uint32_t state;
  // Nanoseconds since its last sign of life.
  uint64_t silent_for_ns;
  // When it joined, by its own account, in nanoseconds of CLOCK_MONOTONIC; 0 before it has
  // answered.
  uint64_t since_ns;
  // This incarnation: each join under the name has another one. Zeros before it has answered.
  uint8_t generation[16];
} warpipe_member_info;

// A change of a member's state.
typedef struct {
  // A warpipe_change_kind.
  uint32_t kind;
  // The member.
  warpipe_member_info member;
} warpipe_change;

// The properties of a range of memory.
typedef struct {
  // The device address of its first byte: a CUdeviceptr, or on the host an address of this
  // process.
  uint64_t data;
  // Its length in bytes, as it was asked for.
  uint64_t bytes;
  // The length of the whole allocation, which warpipe_memory_import_fd needs beside the
  // descriptor; 0 for memory that warpipe_memory_export_fd does not export.
  uint64_t mapped_bytes;
  // Whether it lies on a GPU.
  bool is_cuda;
  // Whether this process may only read it.
  bool is_read_only;
  // The UUID of the GPU that it lies on; zeros for the host.
  uint8_t uuid[16];
  // The name under which it was opened, or its pool's name; else empty.
  char name[81];
} warpipe_memory_info;

// One tensor of a sample or a loan that has several.
typedef struct {
  // Its name, which no other part has, and a zero.
  char name[129];
  // Its layout.
  warpipe_layout layout;
  // The device address of the element with all indices 0. Ignored in an argument.
  uint64_t data;
  // The device address of the first byte of layout.bytes. Ignored in an argument.
  uint64_t slot;
  // 1 if it lies in its sender's own memory, else 0. Ignored in an argument.
  uint32_t is_in_place;
} warpipe_part;

// The most that one user may have of a pool at once, whatever the number of its processes.
typedef struct {
  // The user; it may be the pool's own, which has no limit otherwise.
  uint32_t uid;
  // The most blocks; 0 for no limit.
  uint32_t blocks_max;
  // The most bytes in blocks; 0 for no limit.
  uint64_t bytes_max;
} warpipe_pool_quota;

// Options of a pool. Begin with {.size = sizeof(warpipe_pool_options)}; a field that is 0 has
// its default.
typedef struct {
  // sizeof(warpipe_pool_options).
  size_t size;
  // The domain of its name; the environment's by default.
  const warpipe_domain *domain;
  // The device of its memory; the first GPU by default, else the host.
  const warpipe_device *device;
  // The most device memory that the pool allocates, in bytes; 4 GiB by default. It grows as
  // needed, in regions that double, and keeps them until it is closed, or another user needs the
  // room.
  uint64_t memory_limit;
  // Bytes that are allocated at once; none by default.
  uint64_t reserve;
  // The most clients at once; 256 by default.
  uint32_t peers_max;
  // Other users that are admitted; none by default. Each user gets regions of its own, so that no
  // process of another one can map its blocks.
  warpipe_allow allow;
  // The most bytes in blocks that each user other than the pool's own may have at once, each
  // block rounded up to a multiple of 512; no limit by default. A user's regions take at most as
  // many, rounded up to 2 MiB.
  uint64_t user_bytes_max;
  // The most blocks that each such user may have at once; no limit by default.
  uint32_t user_blocks_max;
  // What single users may have instead.
  const warpipe_pool_quota *quotas;
  // How many those are.
  size_t quotas_count;
} warpipe_pool_options;

// The part of a pool that one user has.
typedef struct {
  // Bytes in blocks that are not free.
  uint64_t bytes;
  // The most bytes that the user may have; 0 for no limit.
  uint64_t bytes_max;
  // Bytes of the user's regions.
  uint64_t region_bytes;
  // The number of blocks that are not free.
  uint32_t blocks;
  // The most blocks that the user may have; 0 for no limit.
  uint32_t blocks_max;
} warpipe_pool_usage;

// The present state of a pool. A block that the owner and a client both have counts in both.
typedef struct {
  // Regions allocated on the device.
  uint64_t regions;
  // Bytes of these regions.
  uint64_t total_bytes;
  // The limit for these bytes.
  uint64_t limit_bytes;
  // Bytes in the owner's blocks.
  uint64_t in_use_bytes;
  // Bytes in clients' blocks.
  uint64_t lent_bytes;
  // Bytes in released blocks that a stream has not completed its work on.
  uint64_t waiting_bytes;
  // The most bytes that were not free at one time.
  uint64_t high_water_bytes;
  // Blocks handed out so far.
  uint64_t allocations;
  // Allocations that had to wait for others.
  uint64_t waits;
  // Clients that are connected, or still have blocks.
  uint64_t peers;
} warpipe_pool_stats;

// Options of a queue. Begin with {.size = sizeof(warpipe_queue_options)}; a field that is 0 has
// its default.
typedef struct {
  // sizeof(warpipe_queue_options).
  size_t size;
  // The domain of its name; the environment's by default.
  const warpipe_domain *domain;
  // The device that holds the inputs; the first GPU by default, else the host.
  const warpipe_device *device;
  // The most jobs that are pending or have an outcome not taken yet; 1,048,576 by default.
  size_t limit;
  // How often a job is tried before it is dead-lettered; 3 by default.
  uint32_t max_attempts;
  // How many jobs a worker may hold at once: 1 to 256; 2 by default.
  uint32_t prefetch;
  // A warpipe_result_order; that of submission, by default.
  uint32_t order;
  // The most workers at once; 256 by default.
  uint32_t workers_max;
  // How long a worker may hold jobs without answering any, in nanoseconds: then they go to other
  // workers, and its late answers do not count. By default its death is waited for.
  uint64_t lease_timeout_ns;
  // The most device memory that inputs may take, in bytes; 4 GiB by default.
  uint64_t memory_limit;
  // How long a worker may take to attach, in nanoseconds; 5 s by default.
  uint64_t handshake_timeout_ns;
  // How long a submission waits for room, and a loan for memory, in nanoseconds; 5 s by default.
  uint64_t submit_timeout_ns;
  // How long a wait polls before it sleeps, in nanoseconds; up to 20 us by default.
  uint64_t spin_ns;
} warpipe_queue_options;

// The jobs and workers of a queue, or the requests and servers of a client, by their numbers.
typedef struct {
  // Workers that can be given jobs.
  size_t workers;
  // Jobs that no worker has leased.
  size_t waiting;
  // Jobs that workers hold.
  size_t leased;
  // Jobs with an outcome that was not taken.
  size_t finished;
} warpipe_queue_state;

// A received tensor, as warpipe_sample_get_info describes it.
typedef struct {
  // The device address of the element with all indices 0: a CUdeviceptr, or on the host an
  // address of this process.
  uint64_t data;
  // The device address of the first byte of layout.bytes.
  uint64_t slot;
  // The tensor's layout.
  warpipe_layout layout;
  // The bytes that were sent with the tensor, valid as long as the sample is.
  const uint8_t *metadata;
  // How many those are.
  size_t metadata_bytes;
  // The sample's number among its publisher's samples, from 1; a gap is samples that this
  // subscriber did not get, which missing counts.
  uint64_t sequence;
  // When it was sent, in nanoseconds of CLOCK_MONOTONIC, as its sender says; 0
  // if it does not, which is timestamps of the publisher's options.
  uint64_t sent_at_ns;
  // When it was received, in nanoseconds of CLOCK_MONOTONIC; 0 where sent_at_ns is.
  uint64_t received_at_ns;
  // Of a job, request or result: the job's number, from 1; else 0.
  uint64_t job;
  // Of a job, request or result: the number of this attempt, from 1; else 0.
  uint32_t attempt;
  // Of a result: the worker's process; of a job or request: the process that submitted it; else
  // 0.
  int32_t pid;
  // Of a job or request: CLOCK_MONOTONIC nanoseconds by which the answer is wanted; 0 if there
  // is no such time.
  uint64_t deadline_ns;
  // How many samples of this publisher are missing between this one and the one received before
  // it; 0 on the first sample of another incarnation: its numbers begin anew, unless both are
  // those of a bridge for one source, and the numbers go on.
  uint64_t missing;
  // Whether there is a break before this sample: samples are missing, or this is the first
  // sample of another incarnation of the publisher, or of the same one after the link had ended.
  bool is_discontinuity;
  // On the first sample of another incarnation of the publisher: the process of the one before;
  // else 0.
  int32_t previous_pid;
  // Whether it lies in its sender's own memory: see warpipe_publisher_loan_in.
  bool is_in_place;
} warpipe_sample_info;

// The state of a semaphore at this moment: it may have changed when the call returns.
typedef struct {
  // The number of permits.
  uint32_t permits;
  // The number of free ones.
  uint32_t available;
  // The number of waiting threads.
  uint32_t waiting;
} warpipe_semaphore_info;

// Options of a client. Begin with {.size = sizeof(warpipe_client_options)}; a field that is 0
// has its default.
typedef struct {
  // sizeof(warpipe_client_options).
  size_t size;
  // The domain of the service; the environment's by default.
  const warpipe_domain *domain;
  // The device that holds the requests; the first GPU by default, else the host.
  const warpipe_device *device;
  // The most requests without a reply; 1,048,576 by default.
  size_t limit;
  // How many attempts at a request may fail before it is dead-lettered; 3 by default.
  uint32_t max_attempts;
  // How many requests a server may hold at once: 1 to 256; 2 by default.
  uint32_t prefetch;
  // How long a server may hold requests without answering any, in nanoseconds: then they go to
  // another server. By default its death is waited for.
  uint64_t lease_timeout_ns;
  // The most device memory that requests may take, in bytes; 4 GiB by default.
  uint64_t memory_limit;
  // How long a loan waits for memory that is in use, in nanoseconds; 5 s by default.
  uint64_t loan_timeout_ns;
  // How long a wait polls before it sleeps, in nanoseconds; up to 20 us by default.
  uint64_t spin_ns;
} warpipe_client_options;

// Options of a server. Begin with {.size = sizeof(warpipe_server_options)}; a field that is 0
// has its default.
typedef struct {
  // sizeof(warpipe_server_options).
  size_t size;
  // The domain of the service; the environment's by default.
  const warpipe_domain *domain;
  // The device to work with, which holds the replies; the first GPU by default, else the host.
  const warpipe_device *device;
  // The most clients at once; 256 by default. Each takes four descriptors.
  size_t clients_max;
  // The most device memory that the replies to one client may take, in bytes; 4 GiB by default.
  uint64_t memory_limit;
  // How long a client may take to accept this server, in nanoseconds; 5 s by default.
  uint64_t handshake_timeout_ns;
  // How long a reply waits for its client to release earlier ones, and a loan for memory, in
  // nanoseconds; 10 s by default.
  uint64_t answer_timeout_ns;
  // How long a wait polls before it sleeps, in nanoseconds; up to 20 us by default.
  uint64_t spin_ns;
} warpipe_server_options;

// Options of warpipe_memory_publish. Begin with {.size = sizeof(warpipe_publish_options)}; a
// field that is 0 has its default.
typedef struct {
  // sizeof(warpipe_publish_options).
  size_t size;
  // The domain to publish in; the environment's by default.
  const warpipe_domain *domain;
  // How importers map the memory, a warpipe_access; for reading, by default.
  uint32_t access;
  // Other users that are admitted; none by default.
  warpipe_allow allow;
} warpipe_publish_options;

// Options of a worker. Begin with {.size = sizeof(warpipe_worker_options)}; a field that is 0
// has its default.
typedef struct {
  // sizeof(warpipe_worker_options).
  size_t size;
  // The domain of the queue's name; the environment's by default.
  const warpipe_domain *domain;
  // The device to work with, which holds the results; the first GPU by default, else the host.
  const warpipe_device *device;
  // How long to wait for a queue of this name, in nanoseconds; by default not at all:
  // WARPIPE_NOT_FOUND.
  uint64_t wait_ns;
  // How long the queue may take to answer, in nanoseconds; 5 s by default.
  uint64_t handshake_timeout_ns;
  // How long an answer waits for the queue's owner to release earlier results, and a loan for
  // memory, in nanoseconds; 10 s by default.
  uint64_t answer_timeout_ns;
  // The most device memory that results may take, in bytes; 4 GiB by default.
  uint64_t memory_limit;
  // How long a wait polls before it sleeps, in nanoseconds; up to 20 us by default.
  uint64_t spin_ns;
} warpipe_worker_options;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes a server of name (1 to 80 bytes of a-z A-Z 0-9 _ - . in parts joined by /) for
// memory of the options' device. options may be null.
//
// *server is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NAME_CONFLICT when another process, or this one, has the name;
// WARPIPE_INVALID_INPUT; WARPIPE_SYSTEM; WARPIPE_DEVICE_FAILED.
//
// Requires: name is a text, options null or the address of options, which name arrays of as many
// elements as they say; server is the address of a pointer.
warpipe_status warpipe_allocation_server_create(const char *name,
                                                const warpipe_create_options *options,
                                                warpipe_allocation_server **server);

// Shares bytes bytes at the device address data, complete behind the stream's work so far, for
// reading and writing. *number is to be sent to one other process, which opens it once
// (warpipe_allocation_client_open_share): for several, share it several times.
//
// Memory of the virtual memory functions (cuMemCreate, cuMemMap), made to be exported by
// descriptors as PyTorch's expandable segments are, comes as such, of all allocations in the
// range; it stays valid when this process dies. Memory of cudaMalloc comes as a legacy handle.
//
// release may be null. It is called once with context, on a thread of this library or in a
// later call of this function, when the receiver has released the memory and its device is past
// it, also after the server was closed; when the receiver is proven dead; of a share that is not
// open, when it is withdrawn, or the server closed; and before the return of a call that fails.
//
// WARPIPE_INVALID_INPUT for memory that cannot be exported, 0 bytes, a stream of another device,
// or beyond 65,535 shares; WARPIPE_INVALID_STATE for a stream that is being captured;
// WARPIPE_DEVICE_FAILED.
//
// Requires: The memory stays allocated until release is called; any thread may call that. stream is a
// stream of the server's device, number the address of a number.
warpipe_status warpipe_allocation_server_share(const warpipe_allocation_server *server,
                                               void *stream,
                                               uint64_t data,
                                               uint64_t bytes,
                                               void (*release)(void*),
                                               void *context,
                                               uint64_t *number);

// Takes back a share that no process has opened. *was_open becomes whether one has, or the share
// was over already: then nothing is done.
//
// Requires: was_open is the address of a bool.
warpipe_status warpipe_allocation_server_withdraw(const warpipe_allocation_server *server,
                                                  uint64_t number,
                                                  bool *was_open);

// Connects to the server of this name in another process, to open its shares. options may be
// null.
//
// *client is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NOT_FOUND when there is none, after wait_ns; WARPIPE_REFUSED, also for a device
// that cannot reach its memory; WARPIPE_NAME_CONFLICT when something else has the name;
// WARPIPE_INVALID_INPUT.
//
// Requires: name is a text, options null or the address of options, client that of a pointer.
warpipe_status warpipe_allocation_client_open(const char *name,
                                              const warpipe_open_options *options,
                                              warpipe_allocation_client **client);

// Opens a share, which is this process's from then on, and waits up to timeout_ns nanoseconds
// until its contents are complete: one that is not opened in time can be opened again.
//
// *memory is the caller's, to be closed by warpipe_close: its owner is told then, or when
// this process has died.
//
// WARPIPE_NOT_FOUND for a share that was opened already, or withdrawn; WARPIPE_TIMEOUT;
// WARPIPE_PEER_GONE; WARPIPE_LIMIT_REACHED; WARPIPE_DEVICE_FAILED.
//
// Requires: memory is the address of a pointer.
warpipe_status warpipe_allocation_client_open_share(const warpipe_allocation_client *client,
                                                    uint64_t number,
                                                    uint64_t timeout_ns,
                                                    warpipe_memory **memory);

// Makes a publisher of name (1 to 80 bytes of a-z A-Z 0-9 _ - . in parts joined by /), and
// begins to listen. options may be null.
//
// *publisher is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NAME_CONFLICT when another process, or this one, has the name;
// WARPIPE_INVALID_INPUT; WARPIPE_SYSTEM; WARPIPE_DEVICE_FAILED.
//
// Requires: name is a text, options null or the address of options, publisher that of a pointer.
warpipe_status warpipe_publisher_create(const char *name,
                                        const warpipe_publisher_options *options,
                                        warpipe_publisher **publisher);

// Lends a slot for a tensor of this layout: memory of the publisher's device that no subscriber
// reads, with undefined contents.
//
// *loan is the caller's, to be closed by warpipe_loan_send or warpipe_loan_discard.
//
// WARPIPE_LIMIT_REACHED when the memory limit is in use for longer than the loan's timeout, or
// the device is full.
//
// Requires: layout is the address of a layout, loan that of a pointer.
warpipe_status warpipe_publisher_loan(const warpipe_publisher *publisher,
                                      const warpipe_layout *layout,
                                      warpipe_loan **loan);

// Lends memory to be sent where it lies, without a copy, by warpipe_loan_send. Subscribers
// receive it as any other sample.
//
// With memory it is that published memory from byte offset on, with the access that the
// publication gives; keep that as long as a subscriber may still receive the first sample in it.
// Without, it is layout.bytes bytes at the device address offset, in memory of cudaMalloc
// (cuMemAlloc): gone when this process is, and subscribers, of this user alone, can also write
// it.
//
// release(argument) is called once: when the loan is discarded, or no subscriber reads the
// tensor any more, because each has released it or is dead; also if this call fails. Nothing
// writes the tensor meanwhile. release may be null.
//
// WARPIPE_INVALID_INPUT for bytes that do not lie in the memory, memory of another device or
// domain than the publisher's, or other memory than warpipe_legacy_export takes; as
// warpipe_publisher_loan.
//
// Requires: release(argument) may be called by any thread, and waits for nothing. Memory without a
// publication stays allocated until then, and as long as a subscriber has it open: perhaps as long
// as that is attached. The rest as for warpipe_publisher_loan.
warpipe_status warpipe_publisher_loan_in(const warpipe_publisher *publisher,
                                         const warpipe_published *memory,
                                         uint64_t offset,
                                         const warpipe_layout *layout,
                                         warpipe_host_function release,
                                         void *argument,
                                         warpipe_loan **loan);

// Loans, copies from memory of the host and sends, in one call. *sequence, which may be null,
// becomes the sample's number. The source may be reused when the call returns.
//
// layout may be null: then the sample is a tensor of bytes bytes (WARPIPE_UINT8). Fails as
// warpipe_publisher_loan and warpipe_loan_send.
//
// Requires: data is the address of bytes bytes; stream is a stream of the publisher's device; layout
// is null or the address of a layout, sequence null or that of a number.
warpipe_status warpipe_publisher_send_host(const warpipe_publisher *publisher,
                                           void *stream,
                                           const warpipe_layout *layout,
                                           const void *data,
                                           size_t bytes,
                                           uint64_t *sequence);

// Waits until count subscribers are attached.
//
// WARPIPE_TIMEOUT.
warpipe_status warpipe_publisher_wait_for_subscribers(const warpipe_publisher *publisher,
                                                      size_t count,
                                                      uint64_t timeout_ns);

// Lists the subscribers, at most capacity of them. *count becomes the number of all.
//
// Requires: subscribers is the address of capacity structures, count that of a number.
warpipe_status warpipe_publisher_list_subscribers(const warpipe_publisher *publisher,
                                                  warpipe_subscriber_info *subscribers,
                                                  size_t capacity,
                                                  size_t *count);

// Attaches to the publisher of this name. options may be null.
//
// *subscriber is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NOT_FOUND when there is none, after wait_ns; WARPIPE_REFUSED;
// WARPIPE_LIMIT_REACHED; WARPIPE_PROTOCOL for another version; WARPIPE_DEVICE_FAILED.
//
// Requires: name is a text, options null or the address of options, subscriber that of a pointer.
warpipe_status warpipe_subscriber_open(const char *name,
                                       const warpipe_subscriber_options *options,
                                       warpipe_subscriber **subscriber);

// Waits for the next sample, up to timeout_ns nanoseconds; 0 takes one that is there. stream
// will wait, on the device, until the sample's data is complete: kernels enqueued on it read
// complete data.
//
// *sample is the caller's, to be closed by warpipe_sample_finish, warpipe_sample_release or
// warpipe_sample_release_on.
//
// WARPIPE_TIMEOUT; WARPIPE_PEER_GONE once every sample that the publisher completed was
// received (not with reconnect); WARPIPE_LINK_CLOSED; WARPIPE_INVALID_STATE for a stream
// that is being captured, or while another thread receives; WARPIPE_DEVICE_FAILED.
//
// Requires: stream is a stream of the subscriber's device, sample the address of a pointer.
warpipe_status warpipe_subscriber_receive(warpipe_subscriber *subscriber,
                                          void *stream,
                                          uint64_t timeout_ns,
                                          warpipe_sample **sample);

// Closes previous, and waits for the next sample with its stream, as
// warpipe_subscriber_receive: in one call of the driver (cuStreamBatchMemOp) while both are
// not complete. previous is released whatever the result, unless the call is refused before it
// waits. It may be closed after any error: WARPIPE_INVALID_OBJECT says that it was.
//
// Requires: as for warpipe_subscriber_receive.
warpipe_status warpipe_subscriber_receive_next(warpipe_subscriber *subscriber,
                                               warpipe_sample *previous,
                                               uint64_t timeout_ns,
                                               warpipe_sample **sample);

// A subscriber's publisher, and how much of it was missed.
//
// Requires: info is the address of such a structure.
warpipe_status warpipe_subscriber_get_info(const warpipe_subscriber *subscriber,
                                           warpipe_publisher_info *info);

// Opens a device: "cuda" or "cuda:N" (an ordinal among those that CUDA_VISIBLE_DEVICES
// leaves), "GPU-..." (a UUID), or "host". NULL is the first GPU if there is one, else the
// host; warpipe_device_get_info says which.
//
// *device is the caller's, to be closed by warpipe_close. Endpoints that were made with
// it stay usable after that.
//
// WARPIPE_DEVICE_UNAVAILABLE, WARPIPE_DEVICE_FAILED, WARPIPE_INVALID_INPUT.
//
// Requires: name is null or a text, device the address of a pointer.
warpipe_status warpipe_device_open(const char *name, warpipe_device **device);

// Reads a device's properties.
//
// Requires: info is the address of such a structure.
warpipe_status warpipe_device_get_info(const warpipe_device *device, warpipe_device_info *info);

// Makes a stream (cuStreamCreate, non-blocking; a thread on the host). On CUDA *stream is a
// CUstream, which is a cudaStream_t; wherever this library takes a stream, it takes any stream
// of the device. Null is the device's default stream.
//
// A stream must live until every endpoint, sample, loan and memory that it was passed with is
// closed: the end of one is ordered behind the stream's work.
//
// *stream is the caller's, to be destroyed by warpipe_stream_destroy.
//
// Requires: stream is the address of a pointer.
warpipe_status warpipe_stream_create(const warpipe_device *device, void **stream);

// Destroys a stream of warpipe_stream_create, once; work that is enqueued still runs. The
// library keeps it as long as endpoints and samples refer to it.
//
// WARPIPE_INVALID_INPUT for any other stream.
warpipe_status warpipe_stream_destroy(const warpipe_device *device, void *stream);

// Waits on the CPU until all work enqueued on the stream so far is done.
//
// WARPIPE_TIMEOUT when it is not within timeout_ns nanoseconds; WARPIPE_DEVICE_FAILED, also
// for a fault of earlier work.
//
// Requires: stream is a stream of the device.
warpipe_status warpipe_stream_synchronize(const warpipe_device *device,
                                          void *stream,
                                          uint64_t timeout_ns);

// Makes stream wait, on the device, until the work enqueued on other so far is done
// (cuStreamWaitEvent). No CPU waits.
//
// Requires: Both are streams of the device.
warpipe_status warpipe_stream_wait_for(const warpipe_device *device, void *stream, void *other);

// Enqueues a function on the CPU behind the stream's work (cuLaunchHostFunc): on the host device
// this is how "kernels" run. It must not call this library or the device, and an exception of C++
// must not leave it.
//
// Requires: function(argument) may be called once, by another thread, at any later time. stream is a
// stream of the device.
warpipe_status warpipe_stream_call(const warpipe_device *device,
                                   void *stream,
                                   warpipe_host_function function,
                                   void *argument);

// Enqueues a copy of bytes bytes between device addresses (cuMemcpyAsync).
//
// Requires: Both ranges stay mapped until the copy is done, and do not overlap. stream is a stream of the
// device.
warpipe_status warpipe_stream_copy(const warpipe_device *device,
                                   void *stream,
                                   uint64_t to,
                                   uint64_t from,
                                   uint64_t bytes);

// The same tensor for consumers of DLPack before 1.0, as at::fromDLPack: they are not told of
// memory that they may only read. The deleter of *legacy calls that of tensor, which is no more
// the caller's.
//
// Requires: tensor is a valid tensor of DLPack that the caller owns, legacy the address of a pointer.
warpipe_status warpipe_dlpack_to_legacy(struct DLManagedTensorVersioned *tensor,
                                        struct DLManagedTensor **legacy);

// Gives a sample to another framework: *tensor is read-only memory of the device, which the
// framework's deleter releases behind the work of the stream that the sample was received with.
// A consumer on another stream waits for the sample first (warpipe_sample_wait_on), and has that
// stream wait for it before the deleter.
//
// Closes sample. *tensor is the caller's, for at::fromDLPackVersioned and its like, or to be
// ended by its own deleter.
//
// WARPIPE_INVALID_INPUT for a tensor with negative strides, which PyTorch does not take; the
// sample stays the caller's then.
//
// Requires: tensor is the address of a pointer.
warpipe_status warpipe_sample_to_dlpack(warpipe_sample *sample,
                                        struct DLManagedTensorVersioned **tensor);

// A view of a loan's memory for another framework to write. It keeps the memory mapped, and gives
// no right to write it once the loan is sent, submitted or discarded. The loan stays the caller's.
//
// *tensor is the caller's, for at::fromDLPackVersioned and its like, or to be ended by its own
// deleter.
//
// Requires: tensor is the address of a pointer.
warpipe_status warpipe_loan_to_dlpack(const warpipe_loan *loan,
                                      struct DLManagedTensorVersioned **tensor);

// A view of memory for another framework, as a tensor of this layout. It keeps the memory open,
// also when memory is closed; until its deleter is called, nothing frees the memory
// (warpipe_memory_free_on refuses). Its work on other streams than the library has seen is for
// the caller to order (warpipe_memory_used_on).
//
// *tensor is the caller's, for at::fromDLPackVersioned and its like, or to be ended by its own
// deleter.
//
// WARPIPE_INVALID_INPUT: the layout is longer than the memory, or has negative strides.
//
// Requires: layout is the address of a layout, tensor that of a pointer.
warpipe_status warpipe_memory_to_dlpack(const warpipe_memory *memory,
                                        const warpipe_layout *layout,
                                        struct DLManagedTensorVersioned **tensor);

// The row-major layout of another framework's tensor: the one to lend for a copy of it. The tensor
// stays the caller's.
//
// Requires: tensor is a valid tensor of DLPack, layout the address of a layout.
warpipe_status warpipe_dlpack_get_layout(const struct DLManagedTensorVersioned *tensor,
                                         warpipe_layout *layout);

// As warpipe_dlpack_get_layout, of a tensor of DLPack before 1.0.
//
// Requires: as for warpipe_dlpack_get_layout.
warpipe_status warpipe_dlpack_get_layout_legacy(const struct DLManagedTensor *tensor,
                                                warpipe_layout *layout);

// Enqueues a copy of another framework's tensor into a loan, in row-major order whatever its
// strides are. It may lie on the host or on the endpoint's GPU. The tensor stays the caller's; on
// a GPU its memory has to stay until the stream has done the copy, as it does if the framework
// frees memory in that stream's order.
//
// WARPIPE_INVALID_INPUT unless shape and element type are the loan's.
//
// Requires: tensor is a valid tensor of DLPack, complete in the stream's order; stream is a stream of
// the endpoint's device.
warpipe_status warpipe_loan_write_dlpack(warpipe_loan *loan,
                                         void *stream,
                                         const struct DLManagedTensorVersioned *tensor);

// As warpipe_loan_write_dlpack, of a tensor of DLPack before 1.0.
//
// Requires: as for warpipe_loan_write_dlpack.
warpipe_status warpipe_loan_write_dlpack_legacy(warpipe_loan *loan,
                                                void *stream,
                                                const struct DLManagedTensor *tensor);

// Opens a domain: a directory of this user with mode 0700, which is made if it is missing. Null is
// the environment's: $WARPIPE_DOMAIN, else $XDG_RUNTIME_DIR/warpipe, else
// /run/user/UID/warpipe, else /tmp/warpipe-UID; it is also the one of every option that is
// left null.
//
// *domain is the caller's, to be closed by warpipe_close.
//
// WARPIPE_SYSTEM: not such a directory.
//
// Requires: path is null or a text, domain the address of a pointer.
warpipe_status warpipe_domain_open(const char *path, warpipe_domain **domain);

// Opens a domain of another user, with endpoints that may admit this one. Trusts that user's
// names.
//
// *domain is the caller's, to be closed by warpipe_close.
//
// Requires: path is a text, domain the address of a pointer.
warpipe_status warpipe_domain_open_of_user(const char *path,
                                           uint32_t owner_uid,
                                           warpipe_domain **domain);

// The path of a domain's directory, written to buffer with a zero at its end. *length becomes
// its length without that, also if the buffer is too short; length may be null.
//
// WARPIPE_INVALID_INPUT: capacity is too small.
//
// Requires: buffer is the address of capacity bytes.
warpipe_status warpipe_domain_get_path(const warpipe_domain *domain,
                                       char *buffer,
                                       size_t capacity,
                                       size_t *length);

// Lists the endpoints of living and of dead processes, sorted by name: at most capacity of them.
// *count becomes the number of all.
//
// Requires: endpoints is the address of capacity structures, count that of a number.
warpipe_status warpipe_domain_list(const warpipe_domain *domain,
                                   warpipe_endpoint *endpoints,
                                   size_t capacity,
                                   size_t *count);

// Makes an event (cuEventCreate with CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING). It has
// no name: warpipe_event_get_handle names it to other processes. options may be null.
//
// *event is the caller's, to be closed by warpipe_close.
//
// WARPIPE_LIMIT_REACHED when the process has 4096; WARPIPE_SYSTEM; WARPIPE_DEVICE_FAILED.
//
// Requires: options is null or the address of options, which name arrays of as many elements as they say;
// event is the address of a pointer.
warpipe_status warpipe_event_create(const warpipe_create_options *options, warpipe_event **event);

// The text that names an event to other processes (cuIpcGetEventHandle), to be sent in any way.
// It gives no right: the event's domain must admit the process that opens it.
//
// The text is written to buffer with a zero at its end. *length becomes its length without
// that, also if the buffer is too short; length may be null.
//
// WARPIPE_INVALID_INPUT: capacity is too small, or the domain's path is not UTF-8;
// WARPIPE_DEVICE_FAILED.
//
// Requires: buffer is the address of capacity bytes, length null or that of a number.
warpipe_status warpipe_event_get_handle(const warpipe_event *event,
                                        char *buffer,
                                        size_t capacity,
                                        size_t *length);

// Opens an event by its handle (cuIpcOpenEventHandle), also in the process that made it.
// options may be null; the handle names the domain unless they do.
//
// *event is the caller's, to be closed by warpipe_close.
//
// WARPIPE_INVALID_INPUT for a text that is no handle of an event; WARPIPE_NOT_FOUND when the
// event is closed or its exporter gone, or WARPIPE_PEER_GONE when it ends meanwhile;
// WARPIPE_TIMEOUT when it does not answer; WARPIPE_REFUSED; WARPIPE_PROTOCOL;
// WARPIPE_SYSTEM; WARPIPE_DEVICE_FAILED.
//
// Requires: event_handle is a text, options null or the address of options, event that of a pointer.
warpipe_status warpipe_event_open(const char *event_handle,
                                  const warpipe_open_options *options,
                                  warpipe_event **event);

// Records the stream's work so far (cuEventRecord), and returns at once. Exporter and importers
// may record; waits are for the last recording. The first recording of an opened event asks its
// exporter, which may take a moment. *recording, which may be null, becomes the recording's
// number, never 0, for warpipe_event_query.
//
// WARPIPE_PEER_GONE when its exporter has died or closed it; WARPIPE_REFUSED when seven others
// record it; WARPIPE_INVALID_INPUT for a stream of another device; WARPIPE_INVALID_STATE for a
// stream that is being captured; WARPIPE_TIMEOUT after 10 s in which another thread's recording
// is blocked; WARPIPE_DEVICE_FAILED.
//
// Requires: stream is a stream of the event's device, recording null or the address of a number.
warpipe_status warpipe_event_record(const warpipe_event *event, void *stream, uint64_t *recording);

// Makes the stream wait, on the device, for the event's last recording (cuStreamWaitEvent), and
// returns at once. *recording, which may be null, becomes that recording's number: the stream's
// later work is valid only if warpipe_event_query says so afterwards.
//
// WARPIPE_INVALID_STATE when the event was never recorded, or for a stream that is being
// captured; WARPIPE_DATA_LOST when the recorder is gone and its work was not done;
// WARPIPE_INVALID_INPUT for a stream of another device; WARPIPE_DEVICE_FAILED.
//
// Requires: stream is a stream of the event's device, recording null or the address of a number.
warpipe_status warpipe_event_wait(const warpipe_event *event, void *stream, uint64_t *recording);

// Whether this recording, of warpipe_event_record or warpipe_event_wait on this event, is
// complete (cuEventQuery); with 0, whether the last one is. False if it may still be.
//
// WARPIPE_DATA_LOST: it never will be, and a stream's work behind its wait is not valid;
// WARPIPE_INVALID_STATE when the event was never recorded; WARPIPE_INVALID_INPUT for a number
// that no recording has.
//
// Requires: is_complete is the address of a bool.
warpipe_status warpipe_event_query(const warpipe_event *event,
                                   uint64_t recording,
                                   bool *is_complete);

// Waits on the CPU, up to timeout_ns nanoseconds, until the last recording is complete
// (cuEventSynchronize).
//
// WARPIPE_TIMEOUT; as warpipe_event_query.
warpipe_status warpipe_event_synchronize(const warpipe_event *event, uint64_t timeout_ns);

// The message of this thread's last error: the fact, and where there is one the next step. Empty
// before the first error. A call that succeeds leaves it as it is. Valid until this thread's next
// call that fails; never null.
const char *warpipe_error_message(void);

// The driver's own code (CUresult) behind this thread's last error; 0 if it came from elsewhere.
int32_t warpipe_error_driver_code(void);

// After WARPIPE_PEER_GONE, the process that is gone; else 0.
int32_t warpipe_error_peer_pid(void);

// After WARPIPE_PEER_GONE, whether the peer had closed its end; else it died. False after other
// errors.
bool warpipe_error_peer_closed(void);

// The name of a status in lower case, for logs: peer_gone. unknown for a number that is none.
// A static string.
const char *warpipe_status_name(uint32_t status);

// The job's number in its queue, or the request's in its client, from 1.
//
// Requires: id is the address of a number.
warpipe_status warpipe_job_get_id(const warpipe_job *job, uint64_t *id);

// Waits for the job's result, up to timeout_ns nanoseconds; 0 takes it if it is there. It is
// complete: work on stream may read it at once. The job's handle stays the caller's.
//
// *sample is the caller's, to be closed by warpipe_sample_finish, warpipe_sample_release or
// warpipe_sample_release_on.
//
// WARPIPE_JOB_FAILED, once: every attempt failed, or a worker rejected it; WARPIPE_TIMEOUT,
// after which it can be waited for again, unless a request's deadline has passed, which
// warpipe_job_is_done says; WARPIPE_NOT_FOUND when its outcome was taken, or the
// job was cancelled; WARPIPE_INVALID_STATE when the queue or client is closed.
//
// Requires: stream is a stream of the queue's device, sample the address of a pointer.
warpipe_status warpipe_job_wait(const warpipe_job *job,
                                void *stream,
                                uint64_t timeout_ns,
                                warpipe_sample **sample);

// Whether warpipe_job_wait would return at once: the outcome is there, or was taken, or the
// deadline of a request has passed.
//
// WARPIPE_INVALID_STATE when the queue or client is closed.
//
// Requires: is_done is the address of a bool.
warpipe_status warpipe_job_is_done(const warpipe_job *job, bool *is_done);

// Cancels the job: it is delivered no more, and the answer of a worker that has it is discarded.
// *was_cancelled, which may be null, becomes false if its outcome was taken before.
//
// WARPIPE_INVALID_STATE when the queue or client is closed.
//
// Requires: was_cancelled is null or the address of a bool.
warpipe_status warpipe_job_cancel(const warpipe_job *job, bool *was_cancelled);

// Fills in the layout of a tensor in row-major order without gaps.
//
// shape has rank lengths; it may be null if rank is 0.
//
// WARPIPE_INVALID_INPUT: too many dimensions, an unknown element type, or more bytes than
// INT64_MAX.
//
// Requires: shape is the address of rank numbers, layout that of a layout.
warpipe_status warpipe_layout_contiguous(uint32_t dtype,
                                         const uint64_t *shape,
                                         uint32_t rank,
                                         warpipe_layout *layout);

// Checks a layout that the caller has filled in, and computes its bytes.
//
// WARPIPE_INVALID_INPUT: it names no tensor, or reaches before the memory's first byte.
//
// Requires: layout is the address of a layout.
warpipe_status warpipe_layout_check(warpipe_layout *layout);

// Lends memory of this process for the result, a tensor of this layout, with undefined contents.
//
// *loan is the caller's, to be closed by warpipe_lease_complete of this lease or
// warpipe_loan_discard.
//
// WARPIPE_LIMIT_REACHED when the memory limit is in use for longer than the answer's timeout, or
// the device is full.
//
// Requires: layout is the address of a layout, loan that of a pointer.
warpipe_status warpipe_lease_output(const warpipe_lease *lease,
                                    const warpipe_layout *layout,
                                    warpipe_loan **loan);

// Completes the job, once the work enqueued on stream so far is done. stream is the stream
// that the job was leased with, or was made to wait for that one. loan is the result, a loan of
// warpipe_lease_output of this lease, which the work on stream fills; or null, for none. Waits
// up to timeout_ns nanoseconds for the submitter to release earlier results
// (WARPIPE_USUAL_TIMEOUT: as long as the worker's options say), but not for the device.
//
// Closes lease and loan when it succeeds, and also when the driver fails after the submitter
// has seen the answer (WARPIPE_DEVICE_FAILED). Else both stay the caller's, to be answered again
// or closed: WARPIPE_PEER_GONE when the submitter has; WARPIPE_TIMEOUT when it holds too many
// earlier results; WARPIPE_INVALID_INPUT for a stream of another device, or a loan of another
// lease; WARPIPE_INVALID_STATE for a stream that is being captured, or a loan of a publisher.
//
// Requires: stream is a stream of the worker's device.
warpipe_status warpipe_lease_complete(warpipe_lease *lease,
                                      warpipe_loan *loan,
                                      void *stream,
                                      uint64_t timeout_ns);

// Fails this attempt: another worker tries, as often as the queue allows. At most 200 bytes of the
// reason are sent. Waits, closes lease, or fails, as warpipe_lease_complete.
//
// Requires: reason is a text.
warpipe_status warpipe_lease_fail(warpipe_lease *lease, const char *reason, uint64_t timeout_ns);

// Rejects the job: no worker tries it again, and its submitter gets WARPIPE_JOB_FAILED. At most
// 200 bytes of the reason are sent. Waits, closes lease, or fails, as warpipe_lease_complete.
//
// Requires: reason is a text.
warpipe_status warpipe_lease_reject(warpipe_lease *lease, const char *reason, uint64_t timeout_ns);

// Returns the job for another worker, at no cost of an attempt: for a worker that leaves. Closes
// lease, or fails, as warpipe_lease_complete.
warpipe_status warpipe_lease_requeue(warpipe_lease *lease, uint64_t timeout_ns);

// A handle for bytes bytes at the device address data, which may lie anywhere in an allocation
// of cudaMalloc (cuMemAlloc): cuIpcGetMemHandle, with the facts that the driver's 64 bytes
// do not include. A process of the same machine and user opens it with warpipe_legacy_open.
//
// Never the first choice: the memory is gone when its exporter is, every importer maps the whole
// allocation around it, and can write it. Memory of warpipe_memory_allocate has none of these
// limits.
//
// The text is written to buffer with a zero at its end. *length becomes its length without
// that, also if the buffer is too short; length may be null.
//
// WARPIPE_INVALID_INPUT: memory that is not of cudaMalloc (null, host, pinned, managed,
// pooled, mapped by the virtual memory functions, freed) or of another device; a range longer than
// its allocation; capacity is too small. WARPIPE_DEVICE_FAILED.
//
// Requires: The allocation stays for as long as another process uses it: the driver does not document its
// behaviour for memory that is freed while another process has it open. The address itself is
// looked up and not trusted. buffer is the address of capacity bytes, length null or that of
// a number.
warpipe_status warpipe_legacy_export(const warpipe_device *device,
                                     uint64_t data,
                                     uint64_t bytes,
                                     char *buffer,
                                     size_t capacity,
                                     size_t *length);

// Opens memory by its legacy handle (cuIpcOpenMemHandle). An allocation that is open already, or
// that this process exported, makes no driver call and has the same address. device may be null:
// the first GPU, else the host; it may be another GPU than the owner if the two have peer access.
// Does not wait.
//
// *memory is the caller's, to be closed by warpipe_close or warpipe_legacy_close. It
// may be read and written, by work on streams that warpipe_memory_used_on was called with.
//
// WARPIPE_PEER_GONE when the exporter is dead; WARPIPE_NOT_FOUND when it has freed the memory;
// WARPIPE_INVALID_INPUT for a text that is no such handle, or one of another machine, or of a
// GPU for the host; WARPIPE_LIMIT_REACHED; WARPIPE_DEVICE_UNAVAILABLE or
// WARPIPE_DEVICE_FAILED for a GPU that this process cannot see or reach.
//
// Requires: legacy_handle is a text, memory the address of a pointer.
warpipe_status warpipe_legacy_open(const char *legacy_handle,
                                   const warpipe_device *device,
                                   warpipe_memory **memory);

// Waits, at most timeout_ns nanoseconds, until the streams that the memory was used on are past
// their work, and closes it (cuIpcCloseMemHandle, if it is the last one of its allocation).
// Closes memory. warpipe_close does the same later, without waiting: this is for an
// exporter that waits to free the memory.
//
// WARPIPE_TIMEOUT when a stream is not done: it is closed when it is. WARPIPE_INVALID_STATE
// for other memory, or while another thread is in a call on it: then it stays the caller's.
// WARPIPE_DEVICE_FAILED.
warpipe_status warpipe_legacy_close(warpipe_memory *memory, uint64_t timeout_ns);

// Describes a loan: its address and layout.
//
// Requires: info is the address of such a structure.
warpipe_status warpipe_loan_get_info(const warpipe_loan *loan, warpipe_loan_info *info);

// Sets bytes that travel with the tensor: up to 4,096 of a publisher's loan,
// less what describes its parts, or the place of a tensor in place; up to 200 of another.
//
// WARPIPE_INVALID_INPUT for more.
//
// Requires: metadata is the address of bytes bytes.
warpipe_status warpipe_loan_set_metadata(warpipe_loan *loan, const void *metadata, size_t bytes);

// Copies the slot's whole contents, layout.bytes bytes, or those of the part with this name,
// from memory of the host, in the stream's order; part may be null. The source may be reused
// when the call returns.
//
// WARPIPE_INVALID_INPUT unless bytes is that many, or if there is no such part;
// WARPIPE_DEVICE_FAILED.
//
// Requires: part is null or a text, data the address of bytes bytes; stream is a stream of the
// endpoint's device.
warpipe_status warpipe_loan_write(warpipe_loan *loan,
                                  void *stream,
                                  const char *part,
                                  const void *data,
                                  size_t bytes);

// Sends a publisher's loan to every subscriber, behind the work enqueued on stream so far.
// *sequence, which may be null, becomes its number, from 1. Does not wait for the device, but up
// to timeout_ns nanoseconds for room where the policy is WARPIPE_POLICY_BLOCK:
// WARPIPE_USUAL_TIMEOUT as long as that says.
//
// Closes loan when it succeeds, and also when the driver fails (WARPIPE_DEVICE_FAILED:
// subscribers see that the sample is lost). Else the loan stays the caller's, to be sent again or
// discarded: WARPIPE_TIMEOUT or WARPIPE_LIMIT_REACHED by the publisher's policy,
// WARPIPE_INVALID_INPUT, WARPIPE_INVALID_STATE for a loan that is not a publisher's or a
// stream that is being captured.
//
// Requires: stream is a stream of the publisher's device; sequence is null or the address of a number.
warpipe_status warpipe_loan_send(warpipe_loan *loan,
                                 void *stream,
                                 uint64_t timeout_ns,
                                 uint64_t *sequence);

// Returns a loan unused, once the work enqueued on stream so far is done. Closes loan, also
// when the driver fails.
//
// Requires: stream is a stream of the endpoint's device.
warpipe_status warpipe_loan_discard(warpipe_loan *loan, void *stream);

// Joins a domain under name, 1 to 72 bytes of a-z A-Z 0-9 _ - . in parts joined by /, until
// the member is closed or the process ends. A process may be several members. options may be
// null.
//
// *member is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NAME_CONFLICT while a living process has the name; WARPIPE_INVALID_INPUT, also for
// the role; WARPIPE_SYSTEM.
//
// Requires: name is a text, options null or the address of options. Their role is null or a text, and
// they name arrays of as many elements as they say; member is the address of a pointer.
warpipe_status warpipe_member_create(const char *name,
                                     const warpipe_member_options *options,
                                     warpipe_member **member);

// Watches the members of a domain (inotify(7)), on two threads of the library. Waits until the
// present ones have answered, at most a second for those that do not. options may be null. A
// watch is no member.
//
// *members is the caller's, to be closed by warpipe_close.
//
// WARPIPE_SYSTEM; WARPIPE_LIMIT_REACHED when there is no watch, thread or descriptor left.
//
// Requires: options is null or the address of options, members that of a pointer.
warpipe_status warpipe_members_open(const warpipe_members_options *options,
                                    warpipe_members **members);

// Lists the present members, sorted by name: at most capacity of them. *count becomes the
// number of all.
//
// WARPIPE_SYSTEM when the directory cannot be read.
//
// Requires: list is the address of capacity structures, count that of a number.
warpipe_status warpipe_members_list(const warpipe_members *members,
                                    warpipe_member_info *list,
                                    size_t capacity,
                                    size_t *count);

// Takes the next change of a member's state, waited for at most timeout_ns nanoseconds; 0 takes
// one that is there.
//
// WARPIPE_TIMEOUT: there was none.
//
// Requires: change is the address of such a structure.
warpipe_status warpipe_members_next_change(const warpipe_members *members,
                                           uint64_t timeout_ns,
                                           warpipe_change *change);

// Allocates bytes bytes that can be given to other processes, zeroed: in all a multiple of the
// device's unit, 2 MiB on CUDA as a rule, a page on the host (cuMemCreate, cuMemMap). device
// may be null: the first GPU, else the host.
//
// *memory is the caller's, to be closed by warpipe_close. The memory lives as long as
// any process has it open.
//
// WARPIPE_LIMIT_REACHED when the device has no room; WARPIPE_INVALID_INPUT for 0 bytes;
// WARPIPE_DEVICE_FAILED; WARPIPE_SYSTEM.
//
// Requires: memory is the address of a pointer.
warpipe_status warpipe_memory_allocate(const warpipe_device *device,
                                       uint64_t bytes,
                                       warpipe_memory **memory);

// Describes memory: its address, length and device.
//
// Requires: info is the address of such a structure.
warpipe_status warpipe_memory_get_info(const warpipe_memory *memory, warpipe_memory_info *info);

// Enqueues a copy of bytes bytes from memory of the host to byte offset
// (cuMemcpyHtoDAsync). The source may be reused when the call returns.
//
// WARPIPE_INVALID_INPUT: beyond the memory's end, memory that was given for reading, or a stream
// of another device; WARPIPE_TIMEOUT when too many copies wait behind streams that stand still;
// WARPIPE_DEVICE_FAILED.
//
// Requires: data is the address of bytes bytes; stream is a stream of the memory's device.
warpipe_status warpipe_memory_write(const warpipe_memory *memory,
                                    void *stream,
                                    uint64_t offset,
                                    const void *data,
                                    size_t bytes);

// Waits on the CPU for the streams that warpipe_memory_write and warpipe_memory_used_on were
// called with on this memory, at most timeout_ns nanoseconds, and copies bytes bytes from byte
// offset on to memory of the host.
//
// WARPIPE_INVALID_INPUT: beyond the memory's end; WARPIPE_TIMEOUT; WARPIPE_DEVICE_FAILED.
//
// Requires: buffer is the address of bytes bytes that nothing else uses during the call.
warpipe_status warpipe_memory_copy_to(const warpipe_memory *memory,
                                      uint64_t offset,
                                      void *buffer,
                                      size_t bytes,
                                      uint64_t timeout_ns);

// Says that the stream is about to be given work on this memory, which is neither unmapped nor
// used again before the stream has done all work that it was given before the memory is closed.
// Call it before the work is enqueued, once for each stream.
//
// Requires: stream is a stream of the memory's device.
warpipe_status warpipe_memory_used_on(const warpipe_memory *memory, void *stream);

// A descriptor of allocated memory, close-on-exec (cuMemExportToShareableHandle, or a duplicate
// of the memfd), to be sent over a socket. Any process that gets it can map all of the memory, for
// reading or writing: warpipe_memory_import_fd.
//
// *fd is the caller's, to be closed by close(2). It becomes -1 when the call fails.
//
// WARPIPE_INVALID_STATE unless the memory is of warpipe_memory_allocate;
// WARPIPE_LIMIT_REACHED; WARPIPE_DEVICE_FAILED.
//
// Requires: fd is the address of a number.
warpipe_status warpipe_memory_export_fd(const warpipe_memory *memory, int32_t *fd);

// Maps memory by a descriptor of warpipe_memory_export_fd that came over the caller's own
// socket. bytes, mapped_bytes and uuid are those of the exporter's warpipe_memory_info;
// uuid may be null on the host. access is a warpipe_access. device may be null: the first
// GPU, else the host. The descriptor's type and size are checked. It stays the caller's, and may
// be closed afterwards.
//
// *memory is the caller's, to be closed by warpipe_close.
//
// WARPIPE_DEVICE_FAILED: another descriptor, another size, or memory that the device cannot
// reach; WARPIPE_INVALID_INPUT: no descriptor, no access, or more bytes than are mapped;
// WARPIPE_LIMIT_REACHED.
//
// Requires: uuid is null or the address of 16 bytes, memory the address of a pointer. fd is not closed
// during the call.
warpipe_status warpipe_memory_import_fd(const warpipe_device *device,
                                        int32_t fd,
                                        uint64_t bytes,
                                        uint64_t mapped_bytes,
                                        const uint8_t *uuid,
                                        uint32_t access,
                                        warpipe_memory **memory);

// A ticket with which other processes open this block of a pool (warpipe_ticket_open) until it
// is closed or freed here; a process that has opened it by then keeps it. access is a
// warpipe_access. The text is written to buffer with a zero at its end. *length becomes its
// length without that, also if the buffer is too short; length may be null.
//
// WARPIPE_INVALID_STATE unless the memory is of warpipe_pool_allocate; WARPIPE_INVALID_INPUT
// when capacity is too small; WARPIPE_PEER_GONE when the pool is closed.
//
// Requires: buffer is the address of capacity bytes, length null or that of a number.
warpipe_status warpipe_memory_lend(const warpipe_memory *memory,
                                   uint32_t access,
                                   char *buffer,
                                   size_t capacity,
                                   size_t *length);

// Frees a block of a pool behind the work enqueued on the stream so far, and on the others that it
// was used on (cuStreamWriteValue64). Does not wait: the block is used again when that work is
// done. Closes memory, also when the device fails.
//
// WARPIPE_INVALID_STATE for memory that is no block of a pool, or while another thread is in a
// call on it: then it stays the caller's. WARPIPE_DEVICE_FAILED.
//
// Requires: stream is a stream of the memory's device.
warpipe_status warpipe_memory_free_on(warpipe_memory *memory, void *stream);

// Closes an object of any type, once; a type says what that ends. It may be called while another
// thread is in a call on the object, which ends when that call returns. Null is ignored.
//
// WARPIPE_INVALID_OBJECT for a pointer that is closed, was consumed by a call, or is no object
// of this library: nothing is read there.
warpipe_status warpipe_close(void *object);

// A descriptor for poll(2) and epoll(7) of a subscriber, a worker, a server, a watch or
// members: readable when its next call with a timeout of 0 (warpipe_subscriber_receive,
// warpipe_worker_lease, warpipe_server_accept, warpipe_members_next_change) is worth making,
// a server's also once a second for a look at new clients. Call until that says WARPIPE_TIMEOUT
// before waiting on it; for a watch see warpipe_watch_quiet. It is the object's, and ends with
// it.
//
// Requires: fd is the address of a number.
warpipe_status warpipe_get_fd(const void *object, int32_t *fd);

// Lends memory for several tensors, which warpipe_loan_send sends as one sample: parts has the
// names and layouts of count of them. Each begins at a multiple of 256 bytes; the loan's own
// layout is that of all their bytes. warpipe_loan_list_parts says where they lie.
//
// WARPIPE_INVALID_INPUT for names that are alike, empty or no UTF-8, and for more than 127
// parts, or more names and layouts than a sample's metadata has room for; as
// warpipe_publisher_loan.
//
// Requires: parts is the address of count structures. The rest as for warpipe_publisher_loan.
warpipe_status warpipe_publisher_loan_parts(const warpipe_publisher *publisher,
                                            const warpipe_part *parts,
                                            size_t count,
                                            warpipe_loan **loan);

// Adds a part to a loan of warpipe_publisher_loan_parts: it is sent where it lies. With memory
// it begins at byte offset of that; without, offset is the device address of its first byte,
// as for warpipe_publisher_loan_in. release(argument) is called once, as for that, also if
// this call fails.
//
// Fails as that does, and with WARPIPE_INVALID_INPUT for another loan.
//
// Requires: name is a text. The rest as for that.
warpipe_status warpipe_loan_add_part(warpipe_loan *loan,
                                     const char *name,
                                     const warpipe_published *memory,
                                     uint64_t offset,
                                     const warpipe_layout *layout,
                                     warpipe_host_function release,
                                     void *argument);

// Lists the parts of a loan, at most capacity of them; none of a loan of one tensor. *count
// becomes the number of all.
//
// Requires: parts is the address of capacity structures, count that of a number.
warpipe_status warpipe_loan_list_parts(const warpipe_loan *loan,
                                       warpipe_part *parts,
                                       size_t capacity,
                                       size_t *count);

// Describes the part of a loan that has this name.
//
// WARPIPE_INVALID_INPUT if there is none.
//
// Requires: name is a text, part the address of a structure.
warpipe_status warpipe_loan_get_part(const warpipe_loan *loan,
                                     const char *name,
                                     warpipe_part *part);

// Describes the part of a sample that has this name.
//
// WARPIPE_INVALID_INPUT if there is none.
//
// Requires: name is a text, part the address of a structure.
warpipe_status warpipe_sample_get_part(const warpipe_sample *sample,
                                       const char *name,
                                       warpipe_part *part);

// Lists the parts of a sample, at most capacity of them; none of a sample of one tensor.
// *count becomes the number of all.
//
// Requires: parts is the address of capacity structures, count that of a number.
warpipe_status warpipe_sample_list_parts(const warpipe_sample *sample,
                                         warpipe_part *parts,
                                         size_t capacity,
                                         size_t *count);

// Makes a pool of name (1 to 80 bytes of a-z A-Z 0-9 _ - . in parts joined by /). options
// may be null.
//
// *pool is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NAME_CONFLICT when another process, or this one, has the name;
// WARPIPE_LIMIT_REACHED for a reserve above the limit, or when the device has no room;
// WARPIPE_INVALID_INPUT; WARPIPE_SYSTEM; WARPIPE_DEVICE_FAILED.
//
// Requires: name is a text, options null or the address of options, which name arrays of as many
// elements as they say; pool is the address of a pointer.
warpipe_status warpipe_pool_create(const char *name,
                                   const warpipe_pool_options *options,
                                   warpipe_pool **pool);

// Allocates a block of bytes bytes, aligned to 512, and waits up to timeout_ns nanoseconds for
// other blocks to be freed. Its contents are what this user left there, or zeros.
//
// *memory is the caller's, to be closed by warpipe_memory_free_on, behind a stream's work, or
// warpipe_close: the block is used again when the streams that it was used on are past
// it, and all processes that opened it have closed it, too. It stays valid when the pool is
// closed.
//
// WARPIPE_LIMIT_REACHED when the blocks in use leave no room, or the device has none;
// WARPIPE_INVALID_INPUT for 0 bytes; WARPIPE_DEVICE_FAILED.
//
// Requires: memory is the address of a pointer.
warpipe_status warpipe_pool_allocate(const warpipe_pool *pool,
                                     uint64_t bytes,
                                     uint64_t timeout_ns,
                                     warpipe_memory **memory);

// As warpipe_pool_allocate, in a region of the user uid: its processes, and no others, can
// open the block's ticket (warpipe_memory_lend). The block counts in that user's quota until it
// is free. That user can read and write all that lies in its regions.
//
// WARPIPE_LIMIT_REACHED also for that quota.
//
// Requires: memory is the address of a pointer.
warpipe_status warpipe_pool_allocate_for(const warpipe_pool *pool,
                                         uint32_t uid,
                                         uint64_t bytes,
                                         uint64_t timeout_ns,
                                         warpipe_memory **memory);

// Reads which part of a pool the user uid has.
//
// Requires: usage is the address of such a structure.
warpipe_status warpipe_pool_get_usage(const warpipe_pool *pool,
                                      uint32_t uid,
                                      warpipe_pool_usage *usage);

// Reads a pool's present state.
//
// Requires: stats is the address of such a structure.
warpipe_status warpipe_pool_get_stats(const warpipe_pool *pool, warpipe_pool_stats *stats);

// Connects to the pool of this name in another process, to allocate from its memory. options may
// be null. A block that its owner lends needs no client: warpipe_ticket_open.
//
// *client is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NOT_FOUND when there is none, after wait_ns; WARPIPE_REFUSED, also for a device
// that cannot reach its memory; WARPIPE_NAME_CONFLICT when something else has the name;
// WARPIPE_INVALID_INPUT.
//
// Requires: name is a text, options null or the address of options, client that of a pointer.
warpipe_status warpipe_pool_client_open(const char *name,
                                        const warpipe_open_options *options,
                                        warpipe_pool_client **client);

// Allocates a block of bytes bytes of the owner's memory, for reading and writing, and waits up
// to timeout_ns nanoseconds for other blocks to be freed. The block is cleared if another user
// had it.
//
// *memory is the caller's, to be closed by warpipe_memory_free_on, behind a stream's work, or
// warpipe_close: then, or when this process has died, the block returns to its owner. It
// stays valid when its owner closes the pool, or dies.
//
// WARPIPE_LIMIT_REACHED when the blocks in use, or this user's quota, leave no room, or the
// device has none; WARPIPE_PEER_GONE; WARPIPE_REFUSED; WARPIPE_INVALID_INPUT for 0 bytes, or
// beyond 1024 blocks at once; WARPIPE_TIMEOUT when the owner does not answer;
// WARPIPE_DEVICE_FAILED.
//
// Requires: memory is the address of a pointer.
warpipe_status warpipe_pool_client_allocate(const warpipe_pool_client *client,
                                            uint64_t bytes,
                                            uint64_t timeout_ns,
                                            warpipe_memory **memory);

// Makes a queue of name (as a publisher's), and begins to accept workers.
// options may be null.
//
// *queue is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NAME_CONFLICT when another process, or this one, has the name;
// WARPIPE_INVALID_INPUT; WARPIPE_SYSTEM; WARPIPE_DEVICE_FAILED.
//
// Requires: name is a text, options null or the address of options, queue that of a pointer.
warpipe_status warpipe_queue_create(const char *name,
                                    const warpipe_queue_options *options,
                                    warpipe_queue **queue);

// Lends memory for the input of a job, a tensor of this layout, with undefined contents.
//
// *loan is the caller's, to be closed by warpipe_queue_submit or warpipe_loan_discard.
//
// WARPIPE_LIMIT_REACHED when the memory limit is in use for longer than the submission's
// timeout, or the device is full.
//
// Requires: layout is the address of a layout, loan that of a pointer.
warpipe_status warpipe_queue_loan(const warpipe_queue *queue,
                                  const warpipe_layout *layout,
                                  warpipe_loan **loan);

// Submits a loan of this queue as a job, behind the work enqueued on stream so far. Waits up to
// timeout_ns nanoseconds for room (WARPIPE_USUAL_TIMEOUT: as long as the queue's options say),
// but neither for a worker nor for the device.
//
// *job is the caller's, to be closed by warpipe_close. job may be null: then
// warpipe_queue_next_result gives the result.
//
// Closes loan when it succeeds, and also when the driver fails after a worker has seen the job
// (WARPIPE_DEVICE_FAILED). Else the loan stays the caller's, to be submitted again or discarded:
// WARPIPE_LIMIT_REACHED without room; WARPIPE_TIMEOUT while the driver blocks another thread's
// submission; WARPIPE_INVALID_INPUT for a loan of another queue or a stream of another device;
// WARPIPE_INVALID_STATE after warpipe_queue_shutdown, for a publisher's loan, or for a stream
// that is being captured.
//
// Requires: stream is a stream of the queue's device; job is null or the address of a pointer.
warpipe_status warpipe_queue_submit(const warpipe_queue *queue,
                                    warpipe_loan *loan,
                                    void *stream,
                                    uint64_t timeout_ns,
                                    warpipe_job **job);

// Waits for the next result, in the order of the queue's options, of a job that
// warpipe_job_wait has not taken: up to timeout_ns nanoseconds; 0 takes one that is there. The
// result is complete: work on stream may read it at once.
//
// *sample is the caller's, to be closed by warpipe_sample_finish, warpipe_sample_release or
// warpipe_sample_release_on. *job, which may be null, becomes the number of the result's job,
// or of the job that failed, and 0 when there is neither.
//
// WARPIPE_JOB_FAILED, once in the job's place: every attempt failed, or a worker rejected it;
// WARPIPE_TIMEOUT, also when there is no job; WARPIPE_INVALID_STATE.
//
// Requires: stream is a stream of the queue's device, sample the address of a pointer; job is null or
// the address of a number.
warpipe_status warpipe_queue_next_result(const warpipe_queue *queue,
                                         void *stream,
                                         uint64_t timeout_ns,
                                         warpipe_sample **sample,
                                         uint64_t *job);

// Waits until count workers are attached.
//
// WARPIPE_TIMEOUT.
warpipe_status warpipe_queue_wait_for_workers(const warpipe_queue *queue,
                                              size_t count,
                                              uint64_t timeout_ns);

// Waits until every job has its outcome. The outcomes stay to be taken.
//
// WARPIPE_TIMEOUT.
warpipe_status warpipe_queue_drain(const warpipe_queue *queue, uint64_t timeout_ns);

// Takes no more jobs, and waits until every job has its outcome. Then, also after a timeout here,
// the queue's name is free, and its workers get WARPIPE_PEER_GONE. The outcomes stay to be taken
// until warpipe_close.
//
// WARPIPE_TIMEOUT; the queue takes no more jobs all the same.
warpipe_status warpipe_queue_shutdown(const warpipe_queue *queue, uint64_t timeout_ns);

// Reads how many jobs are in which state, and the process ids of at most capacity workers.
//
// Requires: state is the address of such a structure, workers that of capacity numbers.
warpipe_status warpipe_queue_get_state(const warpipe_queue *queue,
                                       warpipe_queue_state *state,
                                       int32_t *workers,
                                       size_t capacity);

// Describes a sample: its address, layout, metadata and origin.
//
// Requires: info is the address of such a structure.
warpipe_status warpipe_sample_get_info(const warpipe_sample *sample, warpipe_sample_info *info);

// Makes another stream wait, on the device, until the sample's data is complete: work that is
// enqueued there from now on reads complete data. Release the sample with that stream then, after
// making it wait for the stream that the sample was received with, or that one for it.
//
// WARPIPE_DATA_LOST when the sender died before the data was complete; WARPIPE_DEVICE_FAILED.
//
// Requires: stream is a stream of the subscriber's device.
warpipe_status warpipe_sample_wait_on(const warpipe_sample *sample, void *stream);

// Waits on the CPU until the data is complete. Device work needs no such wait: the stream that the
// sample was received with waits on the device.
//
// WARPIPE_DATA_LOST when the sender died first; WARPIPE_TIMEOUT.
warpipe_status warpipe_sample_wait(const warpipe_sample *sample, uint64_t timeout_ns);

// Whether the data is complete, as the CPU sees it now.
//
// WARPIPE_DATA_LOST when the sender died first.
//
// Requires: is_complete is the address of a bool.
warpipe_status warpipe_sample_is_complete(const warpipe_sample *sample, bool *is_complete);

// Waits for the data and copies the whole slot, layout.bytes bytes, or those of the part with
// this name, to memory of the host. part may be null.
//
// WARPIPE_DATA_LOST; WARPIPE_TIMEOUT; WARPIPE_INVALID_INPUT unless bytes is that many, or
// if there is no such part.
//
// Requires: part is null or a text, buffer is the address of bytes bytes that nothing else uses during
// the call.
warpipe_status warpipe_sample_copy_to(const warpipe_sample *sample,
                                      const char *part,
                                      void *buffer,
                                      size_t bytes,
                                      uint64_t timeout_ns);

// Waits on the CPU until the data is complete, releases the sample behind the work of the stream
// that it was received with, and reports whether its sender lived until then. Closes sample,
// whatever the result, unless another thread is in a call on it (WARPIPE_INVALID_STATE).
//
// WARPIPE_DATA_LOST: discard what was computed from it; WARPIPE_TIMEOUT.
warpipe_status warpipe_sample_finish(warpipe_sample *sample, uint64_t timeout_ns);

// Releases a sample behind the work of the stream that it was received with, without waiting.
// Closes sample. *receipt says later whether the data was complete; it is the caller's, to be
// closed by warpipe_close. receipt may be null: then a lost sample goes unnoticed.
//
// WARPIPE_DEVICE_FAILED when the release could not be enqueued: the slot returns later.
//
// Requires: receipt is null or the address of a pointer.
warpipe_status warpipe_sample_release(warpipe_sample *sample, warpipe_receipt **receipt);

// As warpipe_sample_release, behind the work of another stream, which must have been made to
// wait for the one that the sample was received with (warpipe_stream_wait_for).
//
// Requires: as for warpipe_sample_release; stream is a stream of the subscriber's device.
warpipe_status warpipe_sample_release_on(warpipe_sample *sample,
                                         void *stream,
                                         warpipe_receipt **receipt);

// Waits until it is known whether the data of the released sample was complete.
//
// WARPIPE_DATA_LOST: it was not; WARPIPE_TIMEOUT.
warpipe_status warpipe_receipt_wait(const warpipe_receipt *receipt, uint64_t timeout_ns);

// Makes a semaphore of name (1 to 80 bytes of a-z A-Z 0-9 _ - . in parts joined by /), with
// this number of permits, 1 to 1024, all free. options may be null.
//
// *semaphore is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NAME_CONFLICT when another process, or this one, has the name;
// WARPIPE_INVALID_INPUT, also for the number of permits; WARPIPE_SYSTEM;
// WARPIPE_DEVICE_FAILED.
//
// Requires: name is a text, options null or the address of options, which name arrays of as many
// elements as they say; semaphore is the address of a pointer.
warpipe_status warpipe_semaphore_create(const char *name,
                                        uint32_t permits,
                                        const warpipe_create_options *options,
                                        warpipe_semaphore **semaphore);

// Opens the semaphore of this name, of any process, including this one. options may be null.
//
// *semaphore is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NOT_FOUND when there is none, after wait_ns; WARPIPE_REFUSED, also for another
// kind of device; WARPIPE_NAME_CONFLICT when something else has the name;
// WARPIPE_INVALID_INPUT; WARPIPE_PROTOCOL; WARPIPE_SYSTEM; WARPIPE_DEVICE_FAILED.
//
// Requires: as for warpipe_semaphore_create.
warpipe_status warpipe_semaphore_open(const char *name,
                                      const warpipe_open_options *options,
                                      warpipe_semaphore **semaphore);

// Waits up to timeout_ns nanoseconds for a permit, and makes the stream wait, on the device, for
// the device work of its last holder (cuStreamWaitValue64). No CPU waits for that work. With 0
// it takes a permit that is free and that no thread waits for.
//
// *permit is the caller's, to be closed by warpipe_permit_release,
// warpipe_permit_release_now or warpipe_close.
//
// WARPIPE_TIMEOUT; WARPIPE_PEER_GONE when the semaphore's maker is gone;
// WARPIPE_INVALID_INPUT for a stream of another device; WARPIPE_INVALID_STATE for a stream
// that is being captured; WARPIPE_DEVICE_FAILED: the permit is free again.
//
// Requires: stream is a stream of the semaphore's device, permit the address of a pointer.
warpipe_status warpipe_semaphore_acquire(const warpipe_semaphore *semaphore,
                                         void *stream,
                                         uint64_t timeout_ns,
                                         warpipe_permit **permit);

// As warpipe_semaphore_acquire, and waits on the CPU for the device work of the permit's last
// holder, too: the permit is for work of the CPU.
//
// Requires: permit is the address of a pointer.
warpipe_status warpipe_semaphore_acquire_host(const warpipe_semaphore *semaphore,
                                              uint64_t timeout_ns,
                                              warpipe_permit **permit);

// Reads how many permits there are, how many are free, and how many threads wait.
//
// Requires: info is the address of such a structure.
warpipe_status warpipe_semaphore_get_info(const warpipe_semaphore *semaphore,
                                          warpipe_semaphore_info *info);

// Releases a permit behind the stream's work so far (cuStreamWriteValue64), and returns at once:
// the next holder gets it now, and its stream waits for that work. stream may be another one
// than the permit was acquired on; the caller orders work on further streams before it. Closes
// permit, whatever the result.
//
// WARPIPE_INVALID_INPUT for a stream of another device, WARPIPE_INVALID_STATE for one that is
// being captured: the permit is released as by warpipe_close. WARPIPE_DEVICE_FAILED:
// the next holder gets it when the stream's work is known to be done.
//
// Requires: stream is a stream of the semaphore's device.
warpipe_status warpipe_permit_release(warpipe_permit *permit, void *stream);

// Releases a permit now: the next holder does not wait for this holder's device work. Closes
// permit.
warpipe_status warpipe_permit_release_now(warpipe_permit *permit);

// Makes a client of service (a name as a publisher's, of at most 40 bytes). No server needs to
// exist yet. options may be null.
//
// *client is the caller's, to be closed by warpipe_close.
//
// WARPIPE_INVALID_INPUT; WARPIPE_SYSTEM; WARPIPE_DEVICE_FAILED.
//
// Requires: service is a text, options null or the address of options, client that of a pointer.
warpipe_status warpipe_client_create(const char *service,
                                     const warpipe_client_options *options,
                                     warpipe_client **client);

// Lends memory for a request, a tensor of this layout, with undefined contents.
//
// *loan is the caller's, to be closed by warpipe_client_request or
// warpipe_loan_discard.
//
// WARPIPE_LIMIT_REACHED when the memory limit is in use for longer than the loan's timeout, or
// the device is full.
//
// Requires: layout is the address of a layout, loan that of a pointer.
warpipe_status warpipe_client_loan(const warpipe_client *client,
                                   const warpipe_layout *layout,
                                   warpipe_loan **loan);

// Sends a loan of this client as a request, behind the work enqueued on stream so far. The reply
// is wanted within deadline_ns nanoseconds from now; no server begins the request later, and
// waits for its reply end then.
//
// *request is the caller's, to be closed by warpipe_close: warpipe_job_wait gives the reply.
//
// Closes loan when it succeeds, and also when the driver fails after a server has seen the
// request (WARPIPE_DEVICE_FAILED). Else the loan stays the caller's: WARPIPE_LIMIT_REACHED
// when there is no room until the deadline; WARPIPE_INVALID_INPUT for a loan of another client
// or a stream of another device; WARPIPE_INVALID_STATE for a publisher's loan, or a stream that
// is being captured.
//
// Requires: stream is a stream of the client's device, request the address of a pointer.
warpipe_status warpipe_client_request(const warpipe_client *client,
                                      warpipe_loan *loan,
                                      void *stream,
                                      uint64_t deadline_ns,
                                      warpipe_job **request);

// Waits until count servers are attached. A server attaches to a new client while it is in
// warpipe_server_accept.
//
// WARPIPE_TIMEOUT.
warpipe_status warpipe_client_wait_for_servers(const warpipe_client *client,
                                               size_t count,
                                               uint64_t timeout_ns);

// Reads how many requests are in which state, and the process ids of at most capacity servers.
//
// Requires: state is the address of such a structure, servers that of capacity numbers.
warpipe_status warpipe_client_get_state(const warpipe_client *client,
                                        warpipe_queue_state *state,
                                        int32_t *servers,
                                        size_t capacity);

// Makes a server of service (a name as a publisher's, of at most 40 bytes). No client needs to
// exist yet. options may be null.
//
// *server is the caller's, to be closed by warpipe_close.
//
// WARPIPE_INVALID_INPUT; WARPIPE_SYSTEM; WARPIPE_DEVICE_FAILED.
//
// Requires: service is a text, options null or the address of options, server that of a pointer.
warpipe_status warpipe_server_create(const char *service,
                                     const warpipe_server_options *options,
                                     warpipe_server **server);

// Waits for the next request of any client, up to timeout_ns nanoseconds; 0 takes one that is
// there. Clients are served in turn, and one that goes affects no other. stream, *lease and
// *input are as for warpipe_worker_lease.
//
// WARPIPE_TIMEOUT; WARPIPE_SYSTEM when the domain's directory cannot be read;
// WARPIPE_INVALID_STATE for a stream that is being captured, or while another thread accepts;
// WARPIPE_DEVICE_FAILED.
//
// Requires: stream is a stream of the server's device, lease and input addresses of pointers.
warpipe_status warpipe_server_accept(warpipe_server *server,
                                     void *stream,
                                     uint64_t timeout_ns,
                                     warpipe_lease **lease,
                                     warpipe_sample **input);

// Publishes allocated memory under a name (1 to 80 bytes of a-z A-Z 0-9 _ - . in parts joined by
// /), so that tickets of it can be opened. options may be null. The memory may be closed
// before its publication.
//
// *published is the caller's, to be closed by warpipe_close.
//
// WARPIPE_INVALID_STATE unless the memory is of warpipe_memory_allocate;
// WARPIPE_NAME_CONFLICT when another process, or this one, has the name;
// WARPIPE_INVALID_INPUT; WARPIPE_SYSTEM; WARPIPE_LIMIT_REACHED; WARPIPE_DEVICE_FAILED.
//
// Requires: name is a text, options null or the address of options, published that of a pointer.
warpipe_status warpipe_memory_publish(const warpipe_memory *memory,
                                      const char *name,
                                      const warpipe_publish_options *options,
                                      warpipe_published **published);

// A ticket for the bytes bytes from byte offset on, or for all of them from there where
// bytes is 0, valid until the publication is closed: a text of some hundred letters, digits,
// colons and hyphens, to be sent in any way. It is no secret and gives no right: the owner checks
// each client's credentials. A process that opens it reaches no other bytes through this library,
// but maps all of the memory.
//
// The text is written to buffer with a zero at its end. *length becomes its length without
// that, also if the buffer is too short; length may be null.
//
// WARPIPE_INVALID_INPUT: a range that does not lie inside, capacity is too small, or the
// domain's path is not UTF-8.
//
// Requires: buffer is the address of capacity bytes, length null or that of a number.
warpipe_status warpipe_published_get_ticket(const warpipe_published *published,
                                            uint64_t offset,
                                            uint64_t bytes,
                                            char *buffer,
                                            size_t capacity,
                                            size_t *length);

// A ticket for the memory that will be published under name, now or later, by any process of
// this user. domain may be null. The text is written as by warpipe_published_get_ticket.
//
// WARPIPE_INVALID_INPUT: no name, or capacity is too small; WARPIPE_SYSTEM.
//
// Requires: name is a text, buffer the address of capacity bytes, length null or that of a number.
warpipe_status warpipe_ticket_for(const warpipe_domain *domain,
                                  const char *name,
                                  char *buffer,
                                  size_t capacity,
                                  size_t *length);

// Opens the memory that a ticket names, published memory or a block of a pool, and maps it on the
// device, once in a process. device may be null: the first GPU, else the host. Waits up to
// timeout_ns nanoseconds for memory of warpipe_ticket_for that is not published yet. White
// space around the text is ignored.
//
// *memory is the caller's, to be closed by warpipe_close. It stays valid when its owner
// closes it or dies; a block returns to its pool then.
//
// WARPIPE_NOT_FOUND: not published yet, or the owner is gone or has released the memory;
// WARPIPE_INVALID_INPUT: no ticket, or one of another machine; WARPIPE_NAME_CONFLICT:
// something else has the name; WARPIPE_REFUSED; WARPIPE_LIMIT_REACHED; WARPIPE_TIMEOUT when
// the owner does not answer; WARPIPE_DEVICE_FAILED, also when the device cannot reach the
// memory's.
//
// Requires: ticket is a text, memory the address of a pointer.
warpipe_status warpipe_ticket_open(const char *ticket,
                                   const warpipe_device *device,
                                   uint64_t timeout_ns,
                                   warpipe_memory **memory);

// Makes a timeline of name (1 to 80 bytes of a-z A-Z 0-9 _ - . in parts joined by /) at 0,
// which this process signals and up to 256 processes may open, 128 of them of each other user.
// options may be null.
//
// *timeline is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NAME_CONFLICT when another process, or this one, has the name;
// WARPIPE_INVALID_INPUT; WARPIPE_SYSTEM; WARPIPE_DEVICE_FAILED.
//
// Requires: name is a text, options null or the address of options, which name arrays of as many
// elements as they say; timeline is the address of a pointer.
warpipe_status warpipe_timeline_create(const char *name,
                                       const warpipe_create_options *options,
                                       warpipe_timeline **timeline);

// Opens the timeline of this name, of any process, including this one. It can be waited for, and
// not signalled. options may be null.
//
// *timeline is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NOT_FOUND when there is none, after wait_ns; WARPIPE_REFUSED;
// WARPIPE_LIMIT_REACHED; WARPIPE_NAME_CONFLICT when something else has the name;
// WARPIPE_INVALID_INPUT; WARPIPE_PROTOCOL for another version; WARPIPE_DEVICE_FAILED.
//
// Requires: as for warpipe_timeline_create.
warpipe_status warpipe_timeline_open(const char *name,
                                     const warpipe_open_options *options,
                                     warpipe_timeline **timeline);

// Signals value behind the stream's work so far (cuStreamWriteValue64), and returns at once.
// On several streams the values are reached in the order of the calls: each stream waits on the
// device for the previous one.
//
// WARPIPE_INVALID_INPUT unless the value is above the last one and at most
// WARPIPE_TIMELINE_VALUE_MAX, or for a stream of another device; WARPIPE_REFUSED for a
// timeline that was opened; WARPIPE_INVALID_STATE for a stream that is being captured;
// WARPIPE_TIMEOUT after 10 s in which the driver blocks another thread's signal;
// WARPIPE_DEVICE_FAILED.
//
// Requires: stream is a stream of the timeline's device.
warpipe_status warpipe_timeline_signal(const warpipe_timeline *timeline,
                                       void *stream,
                                       uint64_t value);

// Signals value now, from the CPU.
//
// As warpipe_timeline_signal; WARPIPE_INVALID_INPUT also while a stream has yet to signal an
// earlier value.
warpipe_status warpipe_timeline_signal_now(const warpipe_timeline *timeline, uint64_t value);

// Makes the stream wait, on the device, for value (cuStreamWaitValue64), and returns at once.
// The stream's later work is valid only if warpipe_timeline_is_reached says so afterwards: a
// stream is released, too, when the timeline's owner has died.
//
// In the owner, the value must have been signalled or enqueued to be signalled before.
//
// WARPIPE_PEER_GONE at once, if the owner is gone and did not reach the value;
// WARPIPE_INVALID_INPUT above WARPIPE_TIMELINE_VALUE_MAX, for an owner above its last value,
// or for a stream of another device; WARPIPE_INVALID_STATE for a stream that is being captured;
// WARPIPE_DEVICE_FAILED.
//
// Requires: stream is a stream of the timeline's device.
warpipe_status warpipe_timeline_wait(const warpipe_timeline *timeline,
                                     void *stream,
                                     uint64_t value);

// Waits on the CPU, up to timeout_ns nanoseconds, until value is reached.
//
// WARPIPE_TIMEOUT; WARPIPE_PEER_GONE: it never will be; WARPIPE_INVALID_INPUT above
// WARPIPE_TIMELINE_VALUE_MAX.
warpipe_status warpipe_timeline_wait_host(const warpipe_timeline *timeline,
                                          uint64_t value,
                                          uint64_t timeout_ns);

// Whether value has been reached; false if it may still be.
//
// WARPIPE_PEER_GONE: it never will be, and a stream's work behind its wait is not valid.
//
// Requires: is_reached is the address of a bool.
warpipe_status warpipe_timeline_is_reached(const warpipe_timeline *timeline,
                                           uint64_t value,
                                           bool *is_reached);

// The value now, or the last one if the owner is gone.
//
// Requires: value is the address of a number.
warpipe_status warpipe_timeline_get_value(const warpipe_timeline *timeline, uint64_t *value);

// The library's version, for example "0.1.0". A static string.
const char *warpipe_version(void);

// Whether this library is one for a header of this version: call it first, with
// WARPIPE_VERSION_MAJOR and WARPIPE_VERSION_MINOR. A program that is linked with the library
// is also refused by the loader, which looks for libwarpipe.so.MAJOR.MINOR while the major
// version is 0, and for libwarpipe.so.MAJOR later.
//
// WARPIPE_PROTOCOL: it is not.
warpipe_status warpipe_check_version(uint32_t major, uint32_t minor);

// Makes a watch of a queue: its descriptor is readable when a job has changed, and once more when
// the queue ends. It may be readable without a change.
//
// *watch is the caller's, to be closed by warpipe_close.
//
// WARPIPE_SYSTEM; WARPIPE_LIMIT_REACHED without a descriptor left.
//
// Requires: watch is the address of a pointer.
warpipe_status warpipe_queue_watch(const warpipe_queue *queue, warpipe_watch **watch);

// As warpipe_queue_watch, for the requests of a client.
//
// Requires: as for warpipe_queue_watch.
warpipe_status warpipe_client_watch(const warpipe_client *client, warpipe_watch **watch);

// Makes the descriptor unreadable until the next change. When it is readable, call this and then,
// with a timeout of 0, warpipe_queue_next_result or warpipe_job_wait, in this order.
warpipe_status warpipe_watch_quiet(const warpipe_watch *watch);

// Attaches to the queue of this name. options may be null.
//
// *worker is the caller's, to be closed by warpipe_close.
//
// WARPIPE_NOT_FOUND when there is none, after wait_ns; WARPIPE_NAME_CONFLICT when the name
// is no queue's; WARPIPE_REFUSED; WARPIPE_LIMIT_REACHED; WARPIPE_PROTOCOL for another
// version; WARPIPE_DEVICE_FAILED.
//
// Requires: queue is a text, options null or the address of options, worker that of a pointer.
warpipe_status warpipe_worker_open(const char *queue,
                                   const warpipe_worker_options *options,
                                   warpipe_worker **worker);

// Waits for the next job, up to timeout_ns nanoseconds; 0 takes one that is there. stream will
// wait, on the device, until the input is complete: kernels enqueued on it read complete data.
//
// *lease, the answer, is the caller's, to be closed by warpipe_lease_complete and its like or
// warpipe_close; so is *input, by warpipe_sample_release_on and its like, behind every
// stream with work that reads it, before the answer or after.
//
// WARPIPE_TIMEOUT; WARPIPE_PEER_GONE when the queue has: then a worker's loop is done;
// WARPIPE_LINK_CLOSED when the queue, which lives, has ended this worker's link;
// WARPIPE_INVALID_STATE for a stream that is being captured, or while another thread leases;
// WARPIPE_DEVICE_FAILED.
//
// Requires: stream is a stream of the worker's device, lease and input addresses of pointers.
warpipe_status warpipe_worker_lease(warpipe_worker *worker,
                                    void *stream,
                                    uint64_t timeout_ns,
                                    warpipe_lease **lease,
                                    warpipe_sample **input);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* WARPIPE_H */
