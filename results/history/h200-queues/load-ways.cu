// Ways of a file's pages to a GPU. argv: FILE. nvcc -O2 -o loadways loadways.cu -lcuda -lpthread
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <atomic>
#define CK(x) do { CUresult r = (x); if (r) { const char *s; cuGetErrorName(r, &s); printf("%s: %s\n", #x, s); return -1; } } while (0)
static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static int fd; static size_t total; static CUcontext ctx; static CUdeviceptr dst; static char *mapped;
static std::atomic<size_t> next_block; static size_t part; static int mode; // 0 pread only, 1 pread+copy, 2 memcpy from mmap + copy, 3 registered copy
static void *work(void *) {
    cuCtxSetCurrent(ctx);
    char *buf = (char *)mmap(0, 4 * part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    CUstream s; CUevent e[4]; CUdeviceptr d[4];
    if (mode == 1 || mode == 2) { cuMemHostRegister(buf, 4 * part, CU_MEMHOSTREGISTER_DEVICEMAP); }
    cuStreamCreate(&s, CU_STREAM_NON_BLOCKING); for (int i = 0; i < 4; i++) cuEventCreate(&e[i], CU_EVENT_DISABLE_TIMING);
    const size_t block = 16 << 20; int turn = 0; bool used[4] = {};
    for (;;) {
        size_t at = next_block.fetch_add(block); if (at >= total) break;
        size_t end = at + block < total ? at + block : total;
        for (size_t o = at; o < end; o += part) {
            size_t n = end - o < part ? end - o : part; char *b = buf + (turn % 4) * part;
            if (mode == 3) { cuMemcpyHtoDAsync(dst + o, mapped + o, n, s); continue; }
            if (mode && used[turn % 4]) while (cuEventQuery(e[turn % 4]) == CUDA_ERROR_NOT_READY) sched_yield();
            if (mode == 2) memcpy(b, mapped + o, n); else { size_t done = 0; while (done < n) { ssize_t r = pread(fd, b + done, n - done, o + done); if (r <= 0) { perror("pread"); exit(1); } done += r; } }
            if (mode) { cuMemcpyHtoDAsync(dst + o, (void *)b, n, s); cuEventRecord(e[turn % 4], s); used[turn % 4] = true; }
            turn++;
        }
    }
    cuStreamSynchronize(s); if (mode == 1 || mode == 2) cuMemHostUnregister(buf); munmap(buf, 4 * part); return 0;
}
static double run(int m, int threads, size_t p) {
    mode = m; part = p; next_block = 0; pthread_t t[64]; double b = now();
    for (int i = 0; i < threads; i++) pthread_create(&t[i], 0, work, 0);
    for (int i = 0; i < threads; i++) pthread_join(t[i], 0);
    return now() - b;
}
int main(int, char **argv) {
    CK(cuInit(0)); CUdevice dev; CK(cuDeviceGet(&dev, 0)); CK(cuDevicePrimaryCtxRetain(&ctx, dev)); CK(cuCtxSetCurrent(ctx));
    fd = open(argv[1], O_RDONLY); struct stat st; fstat(fd, &st); total = st.st_size; CK(cuMemAlloc(&dst, total));
    mapped = (char *)mmap(0, total, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
    const char *names[] = {"pread alone", "pread and copy", "memcpy of mmap and copy", "registered mmap, copy"};
    for (int round = 0; round < 2; round++) for (int m = 0; m < 3; m++) for (int threads : {8, 14, 16}) for (size_t p : {128u << 10, 512u << 10}) {
        double t = run(m, threads, p); if (round) printf("%s, %d threads, %zu KiB: %.1f ms, %.1f GB/s\n", names[m], threads, p >> 10, t * 1e3, total / t / 1e9);
    }
    // Read-only, of the file's pages themselves; in parts, by threads.
    double b = now(); CUresult r = cuMemHostRegister(mapped, total, CU_MEMHOSTREGISTER_READ_ONLY | CU_MEMHOSTREGISTER_DEVICEMAP);
    const char *s; cuGetErrorName(r, &s); printf("register of the whole mapping read-only: %s, %.1f ms\n", s, (now() - b) * 1e3);
    if (!r) { for (int i = 0; i < 3; i++) printf("%s: %.1f ms\n", names[3], run(3, 2, 16 << 20) * 1e3); b = now(); cuMemHostUnregister(mapped); printf("unregister: %.1f ms\n", (now() - b) * 1e3); }
    char *pinned; CK(cuMemHostAlloc((void **)&pinned, 1 << 30, 0)); memset(pinned, 1, 1 << 30);
    for (int i = 0; i < 3; i++) { b = now(); for (size_t o = 0; o < total; o += 1 << 30) cuMemcpyHtoDAsync(dst + o, pinned, total - o < (1u << 30) ? total - o : 1 << 30, 0); cuStreamSynchronize(0); double t = now() - b; printf("pinned copy alone: %.1f ms, %.1f GB/s\n", t * 1e3, total / t / 1e9); }
    double c = now(); CUmemAllocationProp prop = {}; prop.type = CU_MEM_ALLOCATION_TYPE_PINNED; prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    size_t size = (total + (2 << 20) - 1) / (2 << 20) * (2 << 20); CUmemGenericAllocationHandle h; CUdeviceptr va; CUmemAccessDesc a = {}; a.location = prop.location; a.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CK(cuMemCreate(&h, size, &prop, 0)); double d = now(); CK(cuMemAddressReserve(&va, size, 0, 0, 0)); CK(cuMemMap(va, size, 0, h, 0)); CK(cuMemSetAccess(va, size, &a, 1));
    printf("create %.1f ms, map %.1f ms\n", (d - c) * 1e3, (now() - d) * 1e3);
    return 0;
}
