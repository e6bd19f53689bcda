// The demo and test kernels. No includes: NVRTC compiles this file by itself (`cargo xtask ptx`).
//
// Every parameter is 64 bits wide, because a launch passes 64-bit words: a float comes as its bit pattern in the
// low half. Every block is a multiple of 32 threads. What another process or the CPU may read while a kernel runs
// is changed by system-scope atomics only. The host versions (host.rs) and the pattern (pattern.rs) must stay equal
// to this file, bit for bit.

typedef unsigned long long u64;

static __device__ __forceinline__ u64 scramble(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static __device__ __forceinline__ u64 stride_key(u64 index) {
    return index * 0x9e3779b97f4a7c15ull;
}

static __device__ __forceinline__ u64 first_index() {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ __forceinline__ u64 grid_stride() {
    return (u64)gridDim.x * blockDim.x;
}

// Sums over the block and adds the sum to *total once: one atomic a block instead of one a thread.
static __device__ __forceinline__ void add_block_sum(u64 part, u64 *total) {
    __shared__ u64 warp_sums[32];
    for (int offset = 16; offset > 0; offset /= 2) part += __shfl_down_sync(0xffffffffu, part, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = part;
    __syncthreads();
    if (threadIdx.x != 0) return;
    u64 sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += warp_sums[warp];
    if (sum != 0) atomicAdd_system(total, sum);
}

static __device__ __forceinline__ u64 nanoseconds_now() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Waits at most ten seconds. A timer that is set back makes the difference huge and so ends the wait too.
static __device__ __forceinline__ void wait_for(u64 nanoseconds) {
    const u64 limit = 10000000000ull;
    const u64 start = nanoseconds_now();
    const u64 due = nanoseconds < limit ? nanoseconds : limit;
    while (nanoseconds_now() - start < due) __nanosleep(500);
}

static __device__ __forceinline__ void fill_words(u64 *words, u64 count, u64 seed) {
    const u64 base = scramble(seed ^ 0x5851f42d4c957f2dull);
    const u64 step = grid_stride();
#pragma unroll 4
    for (u64 i = first_index(); i < count; i += step) words[i] = scramble(base + stride_key(i));
}

extern "C" __global__ void fill(u64 *words, u64 count, u64 seed) { fill_words(words, count, seed); }

extern "C" __global__ void check(const u64 *words, u64 count, u64 seed, u64 *errors) {
    const u64 base = scramble(seed ^ 0x5851f42d4c957f2dull);
    const u64 step = grid_stride();
    u64 wrong = 0;
#pragma unroll 4
    for (u64 i = first_index(); i < count; i += step) wrong += words[i] != scramble(base + stride_key(i));
    add_block_sum(wrong, errors);
}

extern "C" __global__ void checksum(const u64 *words, u64 count, u64 *sum) {
    const u64 step = grid_stride();
    u64 part = 0;
#pragma unroll 4
    for (u64 i = first_index(); i < count; i += step) part += scramble((words[i] ^ 0xd1342543de82ef95ull) + stride_key(i));
    add_block_sum(part, sum);
}

extern "C" __global__ void scale(float *out, const float *in, u64 count, u64 factor_bits) {
    const float factor = __uint_as_float((unsigned)factor_bits);
    const u64 step = grid_stride();
    for (u64 i = first_index(); i < count; i += step) out[i] = __fmul_rn(in[i], factor);
}

extern "C" __global__ void add(float *out, const float *in, u64 count, u64 addend_bits) {
    const float addend = __uint_as_float((unsigned)addend_bits);
    const u64 step = grid_stride();
    for (u64 i = first_index(); i < count; i += step) out[i] = __fadd_rn(in[i], addend);
}

extern "C" __global__ void square_root(float *out, const float *in, u64 count) {
    const u64 step = grid_stride();
    for (u64 i = first_index(); i < count; i += step) out[i] = __fsqrt_rn(in[i]);
}

extern "C" __global__ void spin(u64 nanoseconds) { wait_for(nanoseconds); }

extern "C" __global__ void slow_fill(u64 *words, u64 count, u64 seed, u64 nanoseconds) {
    wait_for(nanoseconds);
    fill_words(words, count, seed);
}

extern "C" __global__ void touch(u64 *words, u64 count) {
    const u64 step = grid_stride();
    for (u64 i = first_index(); i < count; i += step) words[i] += 1;
}

// A semaphore as kernels make one: waits at most so long until *flag is at least `due`, then stores `next`. One thread
// of the launch does it. A flag that does not come in time is left alone.
extern "C" __global__ void pass_on(u64 *flag, u64 due, u64 next, u64 nanoseconds) {
    if (first_index() != 0) return;
    const u64 most = 10000000000ull;
    const u64 limit = nanoseconds < most ? nanoseconds : most;
    const u64 start = nanoseconds_now();
    while (atomicAdd_system(flag, 0ull) < due) {
        if (nanoseconds_now() - start >= limit) return;
    }
    __threadfence_system();
    atomicExch_system(flag, next);
}

// One thread an output; neighbours read neighbouring weights. The sum's order and its single roundings are the host version's.
extern "C" __global__ void dense(float *out, const float *in, const float *weights, const float *bias, u64 rows,
                                 u64 inputs, u64 outputs, u64 relu) {
    const u64 step = grid_stride();
    for (u64 i = first_index(); i < rows * outputs; i += step) {
        const u64 row = i / outputs;
        const u64 column = i % outputs;
        float sum = bias[column];
        for (u64 k = 0; k < inputs; ++k) sum = __fmaf_rn(in[row * inputs + k], weights[k * outputs + column], sum);
        out[i] = relu && sum < 0.0f ? 0.0f : sum;
    }
}
