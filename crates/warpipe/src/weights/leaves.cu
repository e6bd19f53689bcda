// Content hashes: XXH3 (128 bits, no seed, the default secret) of leaves of 16 KiB, the last of a tensor filled up with
// zeros. Four threads hash a leaf: each has two of the eight accumulators. A leaf has sixteen blocks of sixteen stripes of
// 64 bytes; the very last stripe has keys of its own. A leaf may be copied with that: its bytes are read once.

typedef unsigned long long u64;

#define LEAF 16384ull
#define BLOCK 1024ull
#define STRIPE 64ull

// Up to eight leaves side by side: `bytes` bytes at `address`, the number of the first leaf, and where a copy goes.
struct Run {
    u64 address;
    u64 bytes;
    u64 leaf;
    u64 copy;
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
__device__ Pair load(const unsigned char *leaf, u64 at, u64 bytes) {
    Pair pair = {0, 0};
    if (at + 16 <= bytes) {
        const ulonglong2 words = *(const ulonglong2 *)(leaf + at);
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
__device__ void store(unsigned char *leaf, u64 at, u64 bytes, const Pair &pair) {
    if (at + 16 <= bytes) {
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

// One part of a leaf's accumulators: those with the numbers `2 * part` and `2 * part + 1`.
struct Part {
    Pair sum;
    const u64 *keys;
    unsigned number;
};

__device__ __forceinline__ void end_block(Part &part, const Pair &data, bool is_last) {
    if (is_last) {
        const u64 *keys = LAST_KEYS + 2 * part.number;
        accumulate(part.sum, data, keys[0], keys[1]);
    } else {
        accumulate(part.sum, data, part.keys[15], part.keys[16]);
        part.sum.a = scrambled(part.sum.a, part.keys[16]);
        part.sum.b = scrambled(part.sum.b, part.keys[17]);
    }
}

template <bool COPIES>
__device__ __forceinline__ void hash_whole_leaf(Part &part, const unsigned char *leaf, unsigned char *copy) {
    const unsigned char *own = leaf + 16 * part.number;
    unsigned char *const to = copy + 16 * part.number;
    u64 keys[16];
#pragma unroll
    for (int word = 0; word < 16; ++word) {
        keys[word] = part.keys[word];
    }
#pragma unroll 1
    for (u64 block = 0; block < LEAF; block += BLOCK) {
        ulonglong2 data[16];
        // All of them are on their way before the first is needed.
#pragma unroll
        for (int stripe = 0; stripe < 16; ++stripe) {
            data[stripe] = __ldg((const ulonglong2 *)(own + block + stripe * STRIPE));
        }
        if (COPIES) {
#pragma unroll
            for (int stripe = 0; stripe < 16; ++stripe) {
                *(ulonglong2 *)(to + block + stripe * STRIPE) = data[stripe];
            }
        }
#pragma unroll
        for (int stripe = 0; stripe < 15; ++stripe) {
            const Pair pair = {data[stripe].x, data[stripe].y};
            accumulate(part.sum, pair, keys[stripe], keys[stripe + 1]);
        }
        const Pair last = {data[15].x, data[15].y};
        end_block(part, last, block == LEAF - BLOCK);
    }
}

template <bool COPIES>
__device__ __noinline__ void hash_short_leaf(Part &part, const unsigned char *leaf, unsigned char *copy, u64 bytes) {
#pragma unroll 1
    for (u64 block = 0; block < LEAF; block += BLOCK) {
        const u64 own = block + 16 * part.number;
#pragma unroll 1
        for (int stripe = 0; stripe < 16; ++stripe) {
            const u64 at = own + stripe * STRIPE;
            const Pair data = load(leaf, at, bytes);
            if (COPIES) {
                store(copy, at, bytes, data);
            }
            if (stripe < 15) {
                accumulate(part.sum, data, part.keys[stripe], part.keys[stripe + 1]);
            } else {
                end_block(part, data, block == LEAF - BLOCK);
            }
        }
    }
}

template <bool COPIES>
__device__ __forceinline__ Pair leaf_part(const unsigned char *leaf, unsigned char *copy, u64 bytes, unsigned number) {
    Part part = {{BEGIN[2 * number], BEGIN[2 * number + 1]}, STRIPE_KEYS + 2 * number, number};
    if (bytes == LEAF) {
        hash_whole_leaf<COPIES>(part, leaf, copy);
    } else {
        hash_short_leaf<COPIES>(part, leaf, copy, bytes);
    }
    return part.sum;
}

// A warp hashes a run, and four of its threads each leaf.
template <bool COPIES> __device__ __forceinline__ void hash_run(u64 runs, u64 count, u64 hashes) {
    const u64 number = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (number >= count) {
        return;
    }
    const Run run = ((const Run *)runs)[number];
    const unsigned lane = threadIdx.x & 31, part = lane & 3, index = lane >> 2;
    const u64 begin = index * LEAF;
    if (begin >= run.bytes) {
        return;
    }
    const u64 left = run.bytes - begin;
    const u64 bytes = left < LEAF ? left : LEAF;
    const unsigned char *const leaf = (const unsigned char *)(run.address + begin);
    const Pair sum = leaf_part<COPIES>(leaf, (unsigned char *)(run.copy + begin), bytes, part);
    u64 low = folded(sum.a ^ LOW_KEYS[2 * part], sum.b ^ LOW_KEYS[2 * part + 1]);
    u64 high = folded(sum.a ^ HIGH_KEYS[2 * part], sum.b ^ HIGH_KEYS[2 * part + 1]);
    const unsigned together = 0xfu << (4 * index);
    for (int other = 1; other < 4; other *= 2) {
        low += __shfl_xor_sync(together, low, other);
        high += __shfl_xor_sync(together, high, other);
    }
    if (part == 0) {
        u64 *hash = (u64 *)(hashes + 16 * (run.leaf + index));
        hash[0] = avalanche(LEAF * PRIME64_1 + low);
        hash[1] = avalanche(~(LEAF * PRIME64_2) + high);
    }
}

extern "C" __global__ void warpipe_hash_leaves(u64 runs, u64 count, u64 hashes) {
    hash_run<false>(runs, count, hashes);
}

extern "C" __global__ void warpipe_copy_leaves(u64 runs, u64 count, u64 hashes) {
    hash_run<true>(runs, count, hashes);
}
