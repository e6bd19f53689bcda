// A small renderer of indexed triangles: vertices, clearing, visibility, fragments. No includes: NVRTC compiles this
// file by itself (`cargo xtask ptx`).
//
// As in kernels.cu every parameter is 64 bits wide. What is rounded is rounded once, by the functions that are never
// fused, and the rest is integers: the host versions (render/host.rs) give the same bits. Indices come from another
// process, so a triangle that names no vertex is skipped.

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned u32;

// 1/16 of a pixel; the largest coordinate (32768 pixels) and 20 bits of depth keep every product below 2^62.
#define SUBPIXELS 16
#define COORDINATE_MAX 524288.0f
#define DEPTH_MAX 1048575.0f
#define NEAR 1.0f
#define CAMERA 4.0f

// A vertex on the screen. `depth` is below zero where the vertex cannot be seen.
struct Vertex {
    int x, y, depth;
    u32 colour;
    float place[3];
    u32 unused;
};

static __device__ __forceinline__ u64 first_index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }

static __device__ __forceinline__ u64 grid_stride() { return (u64)gridDim.x * blockDim.x; }

static __device__ __forceinline__ float dot(const float *a, const float *b) {
    return __fadd_rn(__fadd_rn(__fmul_rn(a[0], b[0]), __fmul_rn(a[1], b[1])), __fmul_rn(a[2], b[2]));
}

static __device__ __forceinline__ int fixed(float value) {
    return __float2int_rn(fminf(fmaxf(value, -COORDINATE_MAX), COORDINATE_MAX));
}

extern "C" __global__ void render_vertices(Vertex *out, const float *rotation, const float *positions,
                                           const u32 *colours, u64 count, u64 width, u64 height) {
    const float half_width = (float)(width * SUBPIXELS / 2), half_height = (float)(height * SUBPIXELS / 2);
    // The focal length: a unit at the distance of two is as long as the picture is high.
    const float focal = __fmul_rn(half_height, 4.0f);
    const u64 step = grid_stride();
    for (u64 i = first_index(); i < count; i += step) {
        Vertex vertex;
        for (int axis = 0; axis < 3; ++axis) vertex.place[axis] = dot(rotation + 3 * axis, positions + 3 * i);
        const float distance = __fsub_rn(CAMERA, vertex.place[2]);
        const float over_distance = __fdiv_rn(1.0f, distance);
        const float scale = __fmul_rn(focal, over_distance);
        vertex.x = fixed(__fadd_rn(half_width, __fmul_rn(vertex.place[0], scale)));
        vertex.y = fixed(__fsub_rn(half_height, __fmul_rn(vertex.place[1], scale)));
        // What is linear on the screen is one over the distance.
        vertex.depth = distance >= NEAR ? __float2int_rn(__fmul_rn(DEPTH_MAX, __fsub_rn(1.0f, over_distance))) : -1;
        vertex.colour = colours[i];
        vertex.unused = 0;
        out[i] = vertex;
    }
}

extern "C" __global__ void render_clear(u64 *visibility, u64 count) {
    const u64 step = grid_stride();
    for (u64 i = first_index(); i < count; i += step) visibility[i] = ~0ull;
}

static __device__ __forceinline__ i64 edge(const Vertex &a, const Vertex &b, i64 x, i64 y) {
    return ((i64)b.x - a.x) * (y - a.y) - ((i64)b.y - a.y) * (x - a.x);
}

// Finds a triangle's corners; its doubled area, or 0 if it is not to be seen.
static __device__ __forceinline__ i64 corners(const Vertex *vertices, u64 count, const u32 *indices, u64 triangle,
                                              Vertex *corner) {
    for (int i = 0; i < 3; ++i) {
        const u32 index = indices[3 * triangle + i];
        if (index >= count) return 0;
        corner[i] = vertices[index];
        if (corner[i].depth < 0) return 0;
    }
    // The picture's y points down, so that a triangle that faces the camera is turned the other way.
    const i64 area = edge(corner[0], corner[2], corner[1].x, corner[1].y);
    return area > 0 ? area : 0;
}

// The weights of the three corners at the centre of a pixel; false outside.
static __device__ __forceinline__ bool weights(const Vertex *corner, i64 column, i64 row, i64 *weight) {
    const i64 x = column * SUBPIXELS + SUBPIXELS / 2, y = row * SUBPIXELS + SUBPIXELS / 2;
    weight[0] = edge(corner[2], corner[1], x, y);
    weight[1] = edge(corner[0], corner[2], x, y);
    weight[2] = edge(corner[1], corner[0], x, y);
    return weight[0] >= 0 && weight[1] >= 0 && weight[2] >= 0;
}

static __device__ __forceinline__ i64 bounded(i64 value, i64 limit) {
    return value < 0 ? 0 : value > limit ? limit : value;
}

// For each pixel the nearest triangle, as depth and number in one word. The lowest word wins, in whatever order the
// triangles come.
extern "C" __global__ void render_triangles(u64 *visibility, u64 width, u64 height, const Vertex *vertices, u64 count,
                                            const u32 *indices, u64 triangles) {
    const u64 step = grid_stride();
    for (u64 triangle = first_index(); triangle < triangles; triangle += step) {
        Vertex corner[3];
        const i64 area = corners(vertices, count, indices, triangle, corner);
        if (area == 0) continue;
        const i64 left = min(min(corner[0].x, corner[1].x), corner[2].x) / SUBPIXELS;
        const i64 top = min(min(corner[0].y, corner[1].y), corner[2].y) / SUBPIXELS;
        const i64 right = max(max(corner[0].x, corner[1].x), corner[2].x) / SUBPIXELS + 1;
        const i64 bottom = max(max(corner[0].y, corner[1].y), corner[2].y) / SUBPIXELS + 1;
        for (i64 row = bounded(top, height); row < bounded(bottom, height); ++row) {
            for (i64 column = bounded(left, width); column < bounded(right, width); ++column) {
                i64 weight[3];
                if (!weights(corner, column, row, weight)) continue;
                const i64 sum = weight[0] * corner[0].depth + weight[1] * corner[1].depth + weight[2] * corner[2].depth;
                const u64 word = ((u64)(sum / area) << 32) | triangle;
                atomicMin_system(visibility + row * width + column, word);
            }
        }
    }
}

static __device__ __forceinline__ u32 channel(const Vertex *corner, const i64 *weight, i64 area, int shift, int light,
                                              int gloss) {
    i64 sum = 0;
    for (int i = 0; i < 3; ++i) sum += weight[i] * ((corner[i].colour >> shift) & 255);
    const int lit = (int)(sum / area) * light / 256 + gloss;
    return (u32)(lit > 255 ? 255 : lit);
}

// A triangle of one normal: so much light, and so much gloss, of 256.
static __device__ __forceinline__ void shade(const Vertex *corner, int *light, int *gloss) {
    float a[3], b[3];
    for (int i = 0; i < 3; ++i) {
        a[i] = __fsub_rn(corner[1].place[i], corner[0].place[i]);
        b[i] = __fsub_rn(corner[2].place[i], corner[0].place[i]);
    }
    const float normal[3] = {__fsub_rn(__fmul_rn(a[1], b[2]), __fmul_rn(a[2], b[1])),
                             __fsub_rn(__fmul_rn(a[2], b[0]), __fmul_rn(a[0], b[2])),
                             __fsub_rn(__fmul_rn(a[0], b[1]), __fmul_rn(a[1], b[0]))};
    const float towards_light[3] = {-0.48f, 0.64f, 0.6f}, half_way[3] = {-0.27f, 0.36f, 0.893f};
    const float length = fmaxf(__fsqrt_rn(dot(normal, normal)), 1e-20f);
    const float facing = fmaxf(__fdiv_rn(dot(normal, towards_light), length), 0.0f);
    float shine = fmaxf(__fdiv_rn(dot(normal, half_way), length), 0.0f);
    for (int i = 0; i < 5; ++i) shine = __fmul_rn(shine, shine);
    *light = __float2int_rn(__fadd_rn(56.0f, __fmul_rn(200.0f, facing)));
    *gloss = __float2int_rn(__fmul_rn(96.0f, shine));
}

extern "C" __global__ void render_fragments(u32 *pixels, const u64 *visibility, u64 width, u64 height,
                                            const Vertex *vertices, u64 count, const u32 *indices) {
    const u64 step = grid_stride();
    for (u64 i = first_index(); i < width * height; i += step) {
        const u64 row = i / width, column = i % width;
        const u64 word = visibility[i];
        Vertex corner[3];
        i64 weight[3];
        // Asked again, because the indices are another process's and may be others by now.
        const i64 area = word == ~0ull ? 0 : corners(vertices, count, indices, word & 0xffffffffull, corner);
        if (area == 0 || !weights(corner, column, row, weight)) {
            const u32 dusk = (u32)(row * 40 / height);
            pixels[i] = 0xff000000u | (24 + dusk) << 16 | (12 + dusk / 2) << 8 | (10 + dusk / 3);
            continue;
        }
        int light, gloss;
        shade(corner, &light, &gloss);
        u32 pixel = 0xff000000u;
        for (int shift = 0; shift < 24; shift += 8) pixel |= channel(corner, weight, area, shift, light, gloss) << shift;
        pixels[i] = pixel;
    }
}
