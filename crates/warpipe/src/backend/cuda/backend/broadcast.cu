// Stores up to 64 timeline words at once, behind all earlier work of its stream: one launch instead of one
// memory operation per subscriber. The words live in host memory that other processes and devices watch, so
// the stores are releases at system scope, behind a fence at system scope.

#define BROADCAST_WORDS 64

struct Signal {
    unsigned long long word;
    unsigned long long value;
};

struct Signals {
    unsigned long long count;
    Signal signals[BROADCAST_WORDS];
};

extern "C" __global__ void warpipe_broadcast(const __grid_constant__ Signals list) {
    if (threadIdx.x < list.count) {
        __threadfence_system();
        asm volatile("st.release.sys.global.u64 [%0], %1;"
                     :
                     : "l"(list.signals[threadIdx.x].word), "l"(list.signals[threadIdx.x].value)
                     : "memory");
    }
}
