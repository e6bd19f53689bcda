// Copies the elements of one tensor to those of another that lies differently. A unit is as many bytes, a power of two up
// to 16, as divide every row, stride and address; the innermost axis is written side by side, so that the threads of a
// warp store next to each other.

#define GATHER_AXES 9

struct GatherAxis {
    unsigned long long length;
    long long to;
    long long from;
};

struct Gather {
    unsigned long long to;
    unsigned long long from;
    unsigned long long units;
    unsigned long long width;
    unsigned long long rank;
    GatherAxis axes[GATHER_AXES];
};

template <typename Unit, typename Index>
__device__ void gather(const Gather &work) {
    const Index units = (Index)work.units;
    const Index step = (Index)gridDim.x * blockDim.x;
#pragma unroll 1
    for (Index unit = (Index)blockIdx.x * blockDim.x + threadIdx.x; unit < units; unit += step) {
        Index rest = unit;
        long long to = 0;
        long long from = 0;
#pragma unroll 1
        for (int index = (int)work.rank - 1; index > 0; --index) {
            const GatherAxis &axis = work.axes[index];
            const Index length = (Index)axis.length;
            const Index outer = rest / length;
            const long long at = (long long)(rest - outer * length);
            to += at * axis.to;
            from += at * axis.from;
            rest = outer;
        }
        to += (long long)rest * work.axes[0].to;
        from += (long long)rest * work.axes[0].from;
        *(Unit *)(work.to + to) = *(const Unit *)(work.from + from);
    }
}

template <typename Unit>
__device__ void gather_units(const Gather &work) {
    // Division of 64 bits takes several times as long; below this no step of the loop can wrap.
    if (work.units < (1ull << 31)) {
        gather<Unit, unsigned int>(work);
    } else {
        gather<Unit, unsigned long long>(work);
    }
}

extern "C" __global__ void warpipe_gather(const __grid_constant__ Gather work) {
    switch (work.width) {
        case 1: gather_units<unsigned char>(work); break;
        case 2: gather_units<unsigned short>(work); break;
        case 4: gather_units<unsigned int>(work); break;
        case 8: gather_units<unsigned long long>(work); break;
        default: gather_units<uint4>(work); break;
    }
}
