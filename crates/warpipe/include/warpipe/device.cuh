/* warpipe: a ring that kernels of two processes use from inside.
 *
 * Plain CUDA C++ for nvcc and NVRTC, compute capability 7.0 or later, without another include.
 *
 * A kernel takes the address that KernelRing::params (Python: ring.params) gives, as 64 bits, and
 * begins with `warpipe_ring ring = warpipe_ring_open(params);`, which keeps the ring's constants in
 * registers. Items are numbered from 0 and no number comes twice; item `n` lies in slot
 * `n % depth`. The producer waits until a slot is free, writes it, and passes it on; a consumer
 * waits until it is written, reads it, and passes it back. Every consumer gets every item.
 *
 * A wait returns a status. WARPIPE_RING_OK is the only one with which the slot may be used; with any
 * other one the kernel returns. Nothing waits for ever: a wait looks, every `look_every` spins, at
 * words that this process's reactor sets when the peer has closed or is proven dead, and at the
 * word of KernelRing::stop; and it ends after `spins_max` spins.
 *
 * One thread of a block:
 *     unsigned long long item = warpipe_ring_claim(&ring);
 *     if (warpipe_ring_wait(&ring, item) == WARPIPE_RING_OK) { use warpipe_ring_slot(&ring, item);
 *                                                            warpipe_ring_pass(&ring, item); }
 * A whole block, all of its threads, each item to one block:
 *     warpipe_ring_block_claim, then warpipe_ring_block_wait, then warpipe_ring_block_pass
 * Blocks that share every item, each with a part of it; all must run at the same time:
 *     item = warpipe_ring_position(&ring) at first, then one more each time;
 *     warpipe_ring_block_wait, then warpipe_ring_block_arrive(&ring, item, blocks)
 * The last way is also the fastest for one block alone: it makes no atomic addition. A kernel uses
 * one of these ways.
 *
 * An item that was claimed has to be passed on, unless its wait failed: the ring ends then.
 *
 * License: MIT OR Apache-2.0
 */
#ifndef WARPIPE_DEVICE_CUH
#define WARPIPE_DEVICE_CUH

/* Made by `cargo xtask ring-header`; do not edit. */
#define WARPIPE_RING_LAYOUT 1ull /* the version of the block */
#define WARPIPE_RING_DEPTH_MAX 1024ull /* the most slots */
#define WARPIPE_RING_CONSUMERS_MAX 8ull /* the most consumers */
#define WARPIPE_RING_WORD_STRIDE 128ull /* bytes from one slot's word to the next one's */
#define WARPIPE_RING_PRODUCER 0ull /* a role */
#define WARPIPE_RING_CONSUMER 1ull /* a role */
#define WARPIPE_RING_STOP_LOOK 256ull /* items between two looks of a side that never waits */
#define WARPIPE_RING_OK 0ull /* the slot may be used */
#define WARPIPE_RING_CLOSED 1ull /* every peer has ended, and this one gracefully */
#define WARPIPE_RING_DIED 2ull /* every peer has ended, and this one's process is proven dead */
#define WARPIPE_RING_ORPHANED 3ull /* a peer's process has exited; a child of it may keep its kernels running */
#define WARPIPE_RING_STOPPED 4ull /* this side stops */
#define WARPIPE_RING_SPIN_LIMIT 5ull /* the word did not come within the ring's limit of looks */
#define WARPIPE_RING_WRONG_LAYOUT 6ull /* this code was compiled for another version of the block */

struct warpipe_ring_peer {
    unsigned long long mine; /* where this side spins: a word for each slot, in this side's memory */
    unsigned long long theirs; /* where the peer spins: a word for each slot, in the peer's memory */
    unsigned long long gone; /* where this process's reactor says that the peer has ended */
    unsigned long long lost; /* not 0: the producer's kernels wait for this consumer no more */
};
static_assert(sizeof(warpipe_ring_peer) == 32, "warpipe_ring_peer");

struct warpipe_ring_params {
    unsigned long long layout; /* the version */
    unsigned long long role; /* producer or consumer */
    unsigned long long peers; /* how many peers: a consumer has one */
    unsigned long long depth; /* slots, a power of two */
    unsigned long long slot_bytes; /* bytes of a slot, a multiple of 128 */
    unsigned long long spins_max; /* looks at a word after which a wait ends */
    unsigned long long look_every; /* looks at a word between two at the stop and gone words */
    unsigned long long slots; /* the first slot, in the producer's memory */
    unsigned long long stop; /* where this process says that its kernels are to stop */
    unsigned long long status; /* where a failed wait on a stream says why */
    unsigned long long unused_80[6];
    warpipe_ring_peer peer[WARPIPE_RING_CONSUMERS_MAX]; /* the peers */
    unsigned long long cursor; /* the next item; written by this side's kernels alone */
    unsigned long long unused_392[15];
    unsigned long long granted; /* one more than the item that a wait on a stream was given */
    unsigned long long failed; /* how a wait on a stream failed; no later one waits */
    unsigned long long unused_528[14];
    unsigned long long arrivals[1024]; /* for each slot, blocks that have finished its item */
};
static_assert(sizeof(warpipe_ring_params) == 8832, "warpipe_ring_params");
/* End of what is made. */

/* A kernel's own copy of a ring's constants. The ring is `params`. */
struct warpipe_ring {
    warpipe_ring_params *params;
    unsigned long long role;
    unsigned long long peers;
    unsigned long long mask;
    unsigned long long slot_bytes;
    unsigned long long spins_max;
    unsigned long long look_every;
    unsigned long long slots;
    unsigned long long stop;
    unsigned long long mine; /* of the first peer, like the two below */
    unsigned long long theirs;
    unsigned long long gone;
    unsigned long long status; /* not OK: no wait begins */
};

/* Words that another process or the CPU writes, at system scope. */

static __device__ __forceinline__ unsigned long long warpipe_ring_load(unsigned long long word)
{
    unsigned long long value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

static __device__ __forceinline__ unsigned long long warpipe_ring_acquire(unsigned long long word)
{
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

static __device__ __forceinline__ void warpipe_ring_store(unsigned long long word, unsigned long long value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

static __device__ __forceinline__ unsigned long long warpipe_ring_add(unsigned long long word)
{
    unsigned long long before;
    asm volatile("atom.add.acq_rel.sys.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(word) : "memory");
    return before;
}

/* The ring with these parameters, for the calling thread. */
static __device__ __forceinline__ warpipe_ring warpipe_ring_open(unsigned long long params)
{
    warpipe_ring_params *block = (warpipe_ring_params *)params;
    warpipe_ring ring;
    ring.params = block;
    ring.role = block->role;
    ring.peers = block->peers;
    ring.mask = block->depth - 1;
    ring.slot_bytes = block->slot_bytes;
    ring.spins_max = block->spins_max;
    ring.look_every = block->look_every;
    ring.slots = block->slots;
    ring.stop = block->stop;
    ring.mine = block->peer[0].mine;
    ring.theirs = block->peer[0].theirs;
    ring.gone = block->peer[0].gone;
    ring.status = block->layout == WARPIPE_RING_LAYOUT ? WARPIPE_RING_OK : WARPIPE_RING_WRONG_LAYOUT;
    return ring;
}

/* The offset of an item's word among those of a side. */
static __device__ __forceinline__ unsigned long long warpipe_ring_word(const warpipe_ring *ring, unsigned long long item)
{
    return (item & ring->mask) * WARPIPE_RING_WORD_STRIDE;
}

/* The next item of this side that no thread has claimed. */
static __device__ __forceinline__ unsigned long long warpipe_ring_position(const warpipe_ring *ring)
{
    return warpipe_ring_load((unsigned long long)&ring->params->cursor);
}

/* Claims the next item for the calling thread. */
static __device__ __forceinline__ unsigned long long warpipe_ring_claim(const warpipe_ring *ring)
{
    return warpipe_ring_add((unsigned long long)&ring->params->cursor);
}

/* The slot of an item. A consumer may only read it. */
static __device__ __forceinline__ void *warpipe_ring_slot(const warpipe_ring *ring, unsigned long long item)
{
    return (void *)(ring->slots + (item & ring->mask) * ring->slot_bytes);
}

/* Waits until one peer's word is at `due`. */
static __device__ __forceinline__ unsigned long long warpipe_ring_wait_for(
    const warpipe_ring *ring, unsigned long long word, unsigned long long gone_word, unsigned long long due)
{
    unsigned long long until_look = ring->look_every;
    for (unsigned long long spins = 1; warpipe_ring_acquire(word) < due; ++spins) {
        if (--until_look == 0) {
            until_look = ring->look_every;
            if (warpipe_ring_load(ring->stop) != 0)
                return WARPIPE_RING_STOPPED;
            unsigned long long gone = warpipe_ring_acquire(gone_word);
            if (gone != 0) /* The word may have come before the end did. */
                return warpipe_ring_acquire(word) < due ? gone : WARPIPE_RING_OK;
        }
        if (spins >= ring->spins_max)
            return WARPIPE_RING_SPIN_LIMIT;
    }
    return WARPIPE_RING_OK;
}

/* A producer's wait: for every consumer that has not ended. */
static __device__ inline unsigned long long warpipe_ring_wait_for_all(const warpipe_ring *ring, unsigned long long item)
{
    unsigned long long due = item - ring->mask;
    unsigned long long last = WARPIPE_RING_OK;
    unsigned long long lost = 0;
    for (unsigned long long index = 0; index < ring->peers; ++index) {
        warpipe_ring_peer *peer = &ring->params->peer[index];
        unsigned long long seen = warpipe_ring_load((unsigned long long)&peer->lost);
        if (seen == 0) {
            seen = warpipe_ring_wait_for(ring, peer->mine + warpipe_ring_word(ring, item), peer->gone, due);
            if (seen != WARPIPE_RING_OK && seen != WARPIPE_RING_CLOSED && seen != WARPIPE_RING_DIED)
                return seen;
            if (seen != WARPIPE_RING_OK)
                warpipe_ring_store((unsigned long long)&peer->lost, seen);
        }
        if (seen != WARPIPE_RING_OK) {
            last = seen;
            ++lost;
        }
    }
    return lost == ring->peers ? last : WARPIPE_RING_OK;
}

/* Waits until the item's slot may be used, and returns a status. By one thread. */
static __device__ __forceinline__ unsigned long long warpipe_ring_wait(const warpipe_ring *ring, unsigned long long item)
{
    if (ring->status != WARPIPE_RING_OK)
        return ring->status;
    if ((item & (WARPIPE_RING_STOP_LOOK - 1)) == WARPIPE_RING_STOP_LOOK - 1 && warpipe_ring_load(ring->stop) != 0)
        return WARPIPE_RING_STOPPED;
    unsigned long long word = ring->mine + warpipe_ring_word(ring, item);
    if (ring->role == WARPIPE_RING_CONSUMER)
        return warpipe_ring_wait_for(ring, word, ring->gone, item + 1);
    if (item <= ring->mask)
        return WARPIPE_RING_OK;
    if (ring->peers == 1) /* Nothing to remember: the end of the one consumer is the ring's. */
        return warpipe_ring_wait_for(ring, word, ring->gone, item - ring->mask);
    return warpipe_ring_wait_for_all(ring, item);
}

/* Passes the item's slot on: a producer to the consumers, a consumer back. By one thread, behind
 * everything that it did with the slot, and what other threads did before a barrier with it. */
static __device__ __forceinline__ void warpipe_ring_pass(const warpipe_ring *ring, unsigned long long item)
{
    unsigned long long word = warpipe_ring_word(ring, item);
    asm volatile("fence.acq_rel.sys;" : : : "memory");
    warpipe_ring_store(ring->theirs + word, item + 1);
    for (unsigned long long index = 1; index < ring->peers; ++index)
        warpipe_ring_store(ring->params->peer[index].theirs + word, item + 1);
}

static __device__ __forceinline__ bool warpipe_ring_is_first(void)
{
    return threadIdx.x + threadIdx.y + threadIdx.z == 0;
}

/* The value of the block's first thread, for all of its threads. */
static __device__ __forceinline__ unsigned long long warpipe_ring_of_first(unsigned long long value)
{
    __shared__ unsigned long long shared;
    __syncthreads();
    if (warpipe_ring_is_first())
        shared = value;
    __syncthreads();
    return shared;
}

/* Claims the next item for the block. By all threads of it, like the three below. */
static __device__ __forceinline__ unsigned long long warpipe_ring_block_claim(const warpipe_ring *ring)
{
    return warpipe_ring_of_first(warpipe_ring_is_first() ? warpipe_ring_claim(ring) : 0);
}

/* Waits until the block may use the item's slot, and returns a status. */
static __device__ __forceinline__ unsigned long long warpipe_ring_block_wait(const warpipe_ring *ring, unsigned long long item)
{
    return warpipe_ring_of_first(warpipe_ring_is_first() ? warpipe_ring_wait(ring, item) : 0);
}

/* Passes the block's item on. */
static __device__ __forceinline__ void warpipe_ring_block_pass(const warpipe_ring *ring, unsigned long long item)
{
    __syncthreads();
    if (warpipe_ring_is_first())
        warpipe_ring_pass(ring, item);
}

/* One of `blocks` blocks has finished its part of the item; the last one passes it on. */
static __device__ __forceinline__ void warpipe_ring_block_arrive(
    const warpipe_ring *ring, unsigned long long item, unsigned long long blocks)
{
    __syncthreads();
    if (!warpipe_ring_is_first())
        return;
    if (blocks > 1) {
        unsigned long long arrivals = (unsigned long long)&ring->params->arrivals[item & ring->mask];
        if (warpipe_ring_add(arrivals) + 1 < blocks)
            return;
        warpipe_ring_store(arrivals, 0);
    }
    warpipe_ring_pass(ring, item);
    /* Behind the pass, and so behind its fence, which would wait for it. */
    warpipe_ring_store((unsigned long long)&ring->params->cursor, item + 1);
}

#endif
