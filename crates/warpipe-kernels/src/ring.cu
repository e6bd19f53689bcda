// Kernels on both sides of kernel rings, and two that talk by bare words, which rings are measured against.
// Each is launched with any number of blocks, but the bare ones with one. Every parameter is 64 bits wide.

#include "warpipe/device.cuh"

typedef unsigned long long u64;

static __device__ __forceinline__ u64 word_of(u64 seed, u64 item, u64 index) {
    return (seed + item) * 0x9e3779b97f4a7c15ull + index;
}

static __device__ void write_words(u64 *slot, u64 words, u64 seed, u64 item) {
    for (u64 index = threadIdx.x; index < words; index += blockDim.x) slot[index] = word_of(seed, item, index);
}

static __device__ void check_words(const u64 *slot, u64 words, u64 seed, u64 item, u64 *errors) {
    u64 wrong = 0;
    for (u64 index = threadIdx.x; index < words; index += blockDim.x) wrong += slot[index] != word_of(seed, item, index);
    if (wrong != 0) atomicAdd_system(errors, wrong);
}

// Whether the wait failed; says how.
static __device__ bool failed(u64 status, u64 *statuses) {
    if (status != WARPIPE_RING_OK && warpipe_ring_is_first()) atomicMax_system(statuses, status);
    return status != WARPIPE_RING_OK;
}

// Blocks take turns: `items` is for all of them.
static __device__ __forceinline__ bool is_due(u64 turn, u64 items) {
    return turn * gridDim.x + blockIdx.x < items;
}

// A claim by the block's first thread, which need not wait for it: the next item is claimed while this one is written.
static __device__ __forceinline__ u64 claim_if(const warpipe_ring *ring, bool is_due) {
    return is_due && warpipe_ring_is_first() ? warpipe_ring_claim(ring) : 0;
}

extern "C" __global__ void ring_send(u64 params, u64 items, u64 words, u64 seed, u64 statuses) {
    const warpipe_ring opened = warpipe_ring_open(params), *ring = &opened;
    u64 claimed = claim_if(ring, is_due(0, items));
    for (u64 turn = 0; is_due(turn, items); ++turn) {
        const u64 item = warpipe_ring_of_first(claimed);
        if (failed(warpipe_ring_block_wait(ring, item), (u64 *)statuses)) return;
        claimed = claim_if(ring, is_due(turn + 1, items));
        write_words((u64 *)warpipe_ring_slot(ring, item), words, seed, item);
        warpipe_ring_block_pass(ring, item);
    }
}

extern "C" __global__ void ring_receive(u64 params, u64 items, u64 words, u64 seed, u64 errors, u64 statuses) {
    const warpipe_ring opened = warpipe_ring_open(params), *ring = &opened;
    u64 claimed = claim_if(ring, is_due(0, items));
    for (u64 turn = 0; is_due(turn, items); ++turn) {
        const u64 item = warpipe_ring_of_first(claimed);
        if (failed(warpipe_ring_block_wait(ring, item), (u64 *)statuses)) return;
        claimed = claim_if(ring, is_due(turn + 1, items));
        check_words((const u64 *)warpipe_ring_slot(ring, item), words, seed, item, (u64 *)errors);
        warpipe_ring_block_pass(ring, item);
    }
}

static __device__ void copy_words(u64 *to, const u64 *from, u64 words) {
    for (u64 index = threadIdx.x; index < words / 2; index += blockDim.x) ((ulonglong2 *)to)[index] = ((const ulonglong2 *)from)[index];
}

// Copies each item to the block's place, of `words` words, an even number.
extern "C" __global__ void ring_drain(u64 params, u64 items, u64 words, u64 places, u64 statuses) {
    const warpipe_ring opened = warpipe_ring_open(params), *ring = &opened;
    u64 claimed = claim_if(ring, is_due(0, items));
    for (u64 turn = 0; is_due(turn, items); ++turn) {
        const u64 item = warpipe_ring_of_first(claimed);
        if (failed(warpipe_ring_block_wait(ring, item), (u64 *)statuses)) return;
        claimed = claim_if(ring, is_due(turn + 1, items));
        copy_words((u64 *)places + blockIdx.x * words, (const u64 *)warpipe_ring_slot(ring, item), words);
        warpipe_ring_block_pass(ring, item);
    }
}

// The same without a ring: from `slots` slots behind each other, over and over.
extern "C" __global__ void bare_drain(u64 from, u64 slots, u64 items, u64 words, u64 places) {
    for (u64 turn = 0; is_due(turn, items); ++turn) {
        const u64 item = turn * gridDim.x + blockIdx.x;
        copy_words((u64 *)places + blockIdx.x * words, (const u64 *)from + item % slots * words, words);
    }
}

// Sends an item, and waits for the one that comes back, which is to be the same. One block. While an item is on its
// way, the answer before it is passed back and the next slot is waited for.
extern "C" __global__ void ring_ping(u64 out, u64 in, u64 rounds, u64 words, u64 seed, u64 errors, u64 statuses) {
    const warpipe_ring sends = warpipe_ring_open(out), receives = warpipe_ring_open(in);
    const u64 begin = warpipe_ring_position(&sends), answers = warpipe_ring_position(&receives);
    if (rounds == 0 || failed(warpipe_ring_block_wait(&sends, begin), (u64 *)statuses)) return;
    for (u64 round = 0; round < rounds; ++round) {
        const u64 item = begin + round, answer = answers + round;
        write_words((u64 *)warpipe_ring_slot(&sends, item), words, seed, item);
        warpipe_ring_block_arrive(&sends, item, 1);
        if (round != 0) warpipe_ring_block_arrive(&receives, answer - 1, 1);
        if (round + 1 < rounds && failed(warpipe_ring_block_wait(&sends, item + 1), (u64 *)statuses)) return;
        if (failed(warpipe_ring_block_wait(&receives, answer), (u64 *)statuses)) return;
        check_words((const u64 *)warpipe_ring_slot(&receives, answer), words, seed, item, (u64 *)errors);
    }
    warpipe_ring_block_arrive(&receives, answers + rounds - 1, 1);
}

// Sends back what comes. One block.
extern "C" __global__ void ring_echo(u64 in, u64 out, u64 rounds, u64 words, u64 statuses) {
    const warpipe_ring receives = warpipe_ring_open(in), sends = warpipe_ring_open(out);
    const u64 begin = warpipe_ring_position(&receives), answers = warpipe_ring_position(&sends);
    for (u64 round = 0; round < rounds; ++round) {
        const u64 item = begin + round, answer = answers + round;
        if (failed(warpipe_ring_block_wait(&sends, answer), (u64 *)statuses)) return;
        if (failed(warpipe_ring_block_wait(&receives, item), (u64 *)statuses)) return;
        const u64 *from = (const u64 *)warpipe_ring_slot(&receives, item);
        u64 *to = (u64 *)warpipe_ring_slot(&sends, answer);
        for (u64 index = threadIdx.x; index < words; index += blockDim.x) to[index] = from[index];
        warpipe_ring_block_arrive(&sends, answer, 1);
        warpipe_ring_block_arrive(&receives, item, 1);
    }
}

// The bare hand-over: one word each way, no slots but one, no death, no limit but that of the looks.
static __device__ bool await_word(u64 word, u64 due, u64 looks) {
    u64 found = 0;
    if (warpipe_ring_is_first())
        while (looks-- != 0 && (found = warpipe_ring_acquire(word)) < due) {}
    return warpipe_ring_of_first(found) >= due;
}

static __device__ void signal_word(u64 word, u64 value) {
    __syncthreads();
    if (!warpipe_ring_is_first()) return;
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

extern "C" __global__ void bare_ping(u64 mine, u64 theirs, u64 out, u64 in, u64 rounds, u64 words, u64 errors, u64 looks) {
    for (u64 round = 1; round <= rounds; ++round) {
        write_words((u64 *)out, words, 0, round);
        signal_word(theirs, round);
        if (!await_word(mine, round, looks)) {
            if (warpipe_ring_is_first()) atomicAdd_system((u64 *)errors, 1ull << 32);
            return;
        }
        check_words((const u64 *)in, words, 0, round, (u64 *)errors);
        __syncthreads();
    }
}

extern "C" __global__ void bare_echo(u64 mine, u64 theirs, u64 in, u64 out, u64 rounds, u64 words, u64 looks) {
    for (u64 round = 1; round <= rounds; ++round) {
        if (!await_word(mine, round, looks)) return;
        for (u64 index = threadIdx.x; index < words; index += blockDim.x) ((u64 *)out)[index] = ((const u64 *)in)[index];
        signal_word(theirs, round);
    }
}
