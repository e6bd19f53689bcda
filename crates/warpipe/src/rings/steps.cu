// The two steps of a ring on a stream. The position lies in device memory, so a graph may replay them.

#include "warpipe/device.cuh"

extern "C" __global__ void warpipe_ring_wait_step(unsigned long long params) {
    const warpipe_ring ring = warpipe_ring_open(params);
    if (ring.params->failed != WARPIPE_RING_OK)
        return;
    unsigned long long item = ring.params->cursor;
    unsigned long long status = warpipe_ring_wait(&ring, item);
    if (status == WARPIPE_RING_OK) {
        ring.params->granted = item + 1;
        return;
    }
    ring.params->failed = status;
    warpipe_ring_store(ring.params->status, status);
}

// Passes on nothing that the step before it was not given.
extern "C" __global__ void warpipe_ring_pass_step(unsigned long long params) {
    const warpipe_ring ring = warpipe_ring_open(params);
    unsigned long long item = ring.params->cursor;
    if (ring.params->granted != item + 1)
        return;
    warpipe_ring_pass(&ring, item);
    ring.params->cursor = item + 1;
}
