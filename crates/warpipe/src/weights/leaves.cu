// Content hashes: XXH3 (128 bits, no seed, the default secret) of leaves of 16 KiB, the last of a tensor filled up with
// zeros. A leaf has sixteen blocks of sixteen stripes of 64 bytes; the very last stripe has keys of its own. A warp hashes
// a leaf: within a block the accumulators are sums, so eight threads add up two stripes each of a pair of them. A leaf may
// be copied with that: its bytes are read once.

typedef unsigned long long u64;

#define LEAF 16384ull
#define BLOCK 1024ull

// A thread reads 16 bytes of every 512.
#define PIECE 16
#define ROW 512
// The pieces of a thread that are read before the first is needed: those of two blocks.
#define AHEAD 4

// `bytes` bytes at `address`, where a copy goes, and the number of the first leaf.
struct Span {
    u64 address;
    u64 copy;
    u64 bytes;
    u64 leaf;
};

// Of the secret, in words of eight bytes: from byte 0, 121, 11 and 117 on.
__device__ const u64 STRIPE_KEYS[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
__device__ const u64 LAST_KEYS[8] = {
    0xea647378d9c97e9f, 0xc5c3ebd33483acc5, 0x17eb6313faffa081, 0xd349daf0b751dd0d,
    0x2b9e68d429265516, 0x8ffca1477d58be16, 0x45ce31d07ad1b8f8, 0xaf280416958f3acb};
__device__ const u64 LOW_KEYS[8] = {
    0x6dd4de1cad21f72c, 0xa44072db979083e9, 0xe679cb1f67b3b7a4, 0xd05a8278e5c0cc4e,
    0x4608b82172ffcc7d, 0x9035e08e2443f774, 0x52283c4c263a81e6, 0x65d088cb00c391bb};
__device__ const u64 HIGH_KEYS[8] = {
    0xd9c97e9fc83159b4, 0x3483acc5ea647378, 0xfaffa081c5c3ebd3, 0xb751dd0d17eb6313,
    0x29265516d349daf0, 0x7d58be162b9e68d4, 0x7ad1b8f88ffca147, 0x958f3acb45ce31d0};

__device__ const u64 BEGIN[8] = {
    0x00000000c2b2ae3d, 0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9,
    0x85ebca77c2b2ae63, 0x0000000085ebca77, 0x27d4eb2f165667c5, 0x000000009e3779b1};

#define PRIME32_1 0x9e3779b1ull
#define PRIME64_1 0x9e3779b185ebca87ull
#define PRIME64_2 0xc2b2ae3d27d4eb4full
#define PRIME_MX 0x165667919e3779f9ull

struct Pair {
    u64 a;
    u64 b;
};

// Sixteen bytes of a leaf; those behind its end are zeros.
template <bool IS_WHOLE> __device__ __forceinline__ Pair load(const unsigned char *leaf, u64 at, u64 bytes) {
    Pair pair = {0, 0};
    if (IS_WHOLE || at + PIECE <= bytes) {
        const ulonglong2 words = __ldg((const ulonglong2 *)(leaf + at));
        pair.a = words.x;
        pair.b = words.y;
        return pair;
    }
#pragma unroll 1
    for (u64 byte = at; byte < bytes; ++byte) {
        const u64 shifted = (u64)leaf[byte] << (8 * (byte & 7));
        if (byte - at < 8) {
            pair.a |= shifted;
        } else {
            pair.b |= shifted;
        }
    }
    return pair;
}

// Writes what `load` gave.
template <bool IS_WHOLE>
__device__ __forceinline__ void store(unsigned char *leaf, u64 at, u64 bytes, const Pair &pair) {
    if (IS_WHOLE || at + PIECE <= bytes) {
        *(ulonglong2 *)(leaf + at) = make_ulonglong2(pair.a, pair.b);
        return;
    }
#pragma unroll 1
    for (u64 byte = at; byte < bytes; ++byte) {
        const u64 word = byte - at < 8 ? pair.a : pair.b;
        leaf[byte] = (unsigned char)(word >> (8 * (byte & 7)));
    }
}

__device__ __forceinline__ u64 product(u64 word) {
    return (word & 0xffffffffull) * (word >> 32);
}

__device__ __forceinline__ void accumulate(Pair &sum, const Pair &data, u64 key_a, u64 key_b) {
    sum.a += data.b + product(data.a ^ key_a);
    sum.b += data.a + product(data.b ^ key_b);
}

__device__ __forceinline__ u64 scrambled(u64 sum, u64 key) {
    return (sum ^ (sum >> 47) ^ key) * PRIME32_1;
}

__device__ __forceinline__ u64 folded(u64 a, u64 b) {
    return (a * b) ^ __umul64hi(a, b);
}

__device__ __forceinline__ u64 avalanche(u64 hash) {
    hash ^= hash >> 37;
    hash *= PRIME_MX;
    return hash ^ (hash >> 32);
}

struct Thread {
    unsigned lane;
    // The number of its pair of accumulators, and of the first of its two stripes: the other is eight further.
    unsigned pair;
    unsigned stripe;
};

// Adds up one block's stripes, which eight threads of each pair have. All of them have the sum.
__device__ __forceinline__ Pair block_sum(const Thread &it, const Pair *data, bool is_last) {
    const u64 *const keys = STRIPE_KEYS + 2 * it.pair + it.stripe;
    const bool ends_leaf = is_last && it.stripe == 7;
    const u64 *const other = ends_leaf ? LAST_KEYS + 2 * it.pair : keys + 8;
    Pair sum = {0, 0};
    accumulate(sum, data[0], keys[0], keys[1]);
    accumulate(sum, data[1], other[0], other[1]);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
        sum.a += __shfl_xor_sync(0xffffffff, sum.a, distance);
        sum.b += __shfl_xor_sync(0xffffffff, sum.b, distance);
    }
    return sum;
}

// The pair of accumulators behind all bytes of a leaf.
template <bool COPIES, bool IS_WHOLE>
__device__ __forceinline__ Pair leaf_sum(const Thread &it, const unsigned char *leaf, unsigned char *copy, u64 bytes) {
    const u64 *const keys = STRIPE_KEYS + 2 * it.pair + 16;
    Pair sum = {BEGIN[2 * it.pair], BEGIN[2 * it.pair + 1]};
#pragma unroll 1
    for (u64 begin = PIECE * it.lane; begin < LEAF; begin += AHEAD * ROW) {
        Pair data[AHEAD];
#pragma unroll
        for (int piece = 0; piece < AHEAD; ++piece) {
            data[piece] = load<IS_WHOLE>(leaf, begin + piece * ROW, bytes);
        }
        if (COPIES) {
#pragma unroll
            for (int piece = 0; piece < AHEAD; ++piece) {
                store<IS_WHOLE>(copy, begin + piece * ROW, bytes, data[piece]);
            }
        }
#pragma unroll
        for (int piece = 0; piece < AHEAD; piece += 2) {
            const bool is_last = begin + (piece + 2) * ROW >= LEAF;
            const Pair block = block_sum(it, data + piece, is_last);
            sum.a += block.a;
            sum.b += block.b;
            if (!is_last) {
                sum.a = scrambled(sum.a, keys[0]);
                sum.b = scrambled(sum.b, keys[1]);
            }
        }
    }
    return sum;
}

template <bool COPIES>
__device__ __noinline__ Pair short_leaf_sum(const Thread &it, const unsigned char *leaf, unsigned char *copy, u64 bytes) {
    return leaf_sum<COPIES, false>(it, leaf, copy, bytes);
}

// The span that the leaf with this number lies in.
__device__ Span span_of(const Span *spans, u64 count, u64 leaf) {
    u64 first = 0, end = count;
    while (end - first > 1) {
        const u64 middle = (first + end) / 2;
        if (spans[middle].leaf <= leaf) {
            first = middle;
        } else {
            end = middle;
        }
    }
    return spans[first];
}

// A warp hashes a leaf of `leaves`, which lie in `count` spans.
template <bool COPIES> __device__ __forceinline__ void hash_spans(u64 spans, u64 count, u64 leaves, u64 hashes) {
    const u64 number = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (number >= leaves) {
        return;
    }
    const unsigned lane = threadIdx.x & 31;
    const Thread it = {lane, lane & 3, lane >> 2};
    const Span span = span_of((const Span *)spans, count, number);
    const u64 begin = (number - span.leaf) * LEAF, bytes = span.bytes - begin;
    const unsigned char *const leaf = (const unsigned char *)(span.address + begin);
    unsigned char *const copy = (unsigned char *)(span.copy + begin);
    const Pair sum = bytes >= LEAF ? leaf_sum<COPIES, true>(it, leaf, copy, LEAF)
                                   : short_leaf_sum<COPIES>(it, leaf, copy, bytes);
    u64 low = folded(sum.a ^ LOW_KEYS[2 * it.pair], sum.b ^ LOW_KEYS[2 * it.pair + 1]);
    u64 high = folded(sum.a ^ HIGH_KEYS[2 * it.pair], sum.b ^ HIGH_KEYS[2 * it.pair + 1]);
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        low += __shfl_xor_sync(0xffffffff, low, distance);
        high += __shfl_xor_sync(0xffffffff, high, distance);
    }
    if (lane == 0) {
        u64 *const hash = (u64 *)(hashes + 16 * number);
        hash[0] = avalanche(LEAF * PRIME64_1 + low);
        hash[1] = avalanche(~(LEAF * PRIME64_2) + high);
    }
}

extern "C" __global__ void warpipe_hash_leaves(u64 spans, u64 count, u64 leaves, u64 hashes) {
    hash_spans<false>(spans, count, leaves, hashes);
}

extern "C" __global__ void warpipe_copy_leaves(u64 spans, u64 count, u64 leaves, u64 hashes) {
    hash_spans<true>(spans, count, leaves, hashes);
}
