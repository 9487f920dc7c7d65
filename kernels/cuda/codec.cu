// The codec on a GPU: a warp a row, one launch for all messages of an exchange. kernels/reference.py specifies every
// operation; this file is compiled by NVRTC with --fmad=false and SYLVIE_BITS = 1, 2, 4, 8 or 16, and by a C++ compiler
// for the tests, which emulate a warp. Lane l holds columns l and l + 32 of each block of 64 columns: they share a hash.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

#define BITS SYLVIE_BITS
#define ALL 0xFFFFFFFFu
#define LARGEST 3.402823466e38f
#define INFINITE 0x7F800000u

static const int LAST = BITS == 16 ? 0 : (1 << (BITS & 15)) - 1;  // the last code
static const int FRACTION = BITS == 8 ? 15 : 16;                  // bits of T below one step
static const int HEADER_BYTES = 32, ROW_HEADER_BYTES = BITS == 16 ? 0 : 4;
static const int HELD = 8;  // values of a row that a lane keeps in registers between the passes: 256 columns
enum Rounding { STOCHASTIC = 0, NEAREST = 1, DITHERED = 2, ROTATED = 3 };
enum Variant { PLAIN = 0, DIFFERENCE = 1, FEEDBACK = 2 };

struct Grid {
    int k, m, biased;
};

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }
__device__ __forceinline__ int exponent_of(float v) { return (int)(__float_as_uint(v) >> 23 & 255) - 127; }
__device__ __forceinline__ float saturate(float v) { return fmaxf(fminf(v, LARGEST), -LARGEST); }
__device__ __forceinline__ bool finite(float v) { return (__float_as_uint(v) & INFINITE) != INFINITE; }

__device__ Grid covering_grid(float low, float high) {
    int exponent = max(exponent_of(fmaxf(fabsf(low), fabsf(high))) - 14, exponent_of(high * 0.5f - low * 0.5f) - 6);
    exponent = max(exponent, -126);
    for (;; ++exponent) {
        const float scale = power_of_two(-exponent);
        const int k = __float2int_rd(low * scale), m = __float2int_ru(high * scale) - k;
        if (m <= 255) return {k, m, exponent + 127};
    }
}

__device__ __forceinline__ void row_words(u64 stream, i64 key, u32* low, u32* high) {
    u64 word = (u64)key * 0x9E3779B97F4A7C15ull + stream;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ word >> 27) * 0x94D049BB133111EBull;
    word ^= word >> 31;
    *low = (u32)word;
    *high = (u32)(word >> 32);
}

__device__ __forceinline__ u32 hash_of(u32 low, u32 high, u32 j) {
    u32 h = low + j * 0x9E3779B9u;
    h = (h ^ h >> 16) * 0x7FEB352Du ^ high;
    h = (h ^ h >> 15) * 0x846CA68Bu;
    return h ^ h >> 16;
}

// Bytes of a row's codes; a row that is rotated is filled up with zeros to a power of two numbers.
__device__ __forceinline__ i64 code_bytes_of(i64 cols, int rounding) {
    if (rounding != ROTATED) return (cols * BITS + 7) / 8;
    i64 width = 32;
    while (width < cols) width *= 2;
    return width / 8;
}

struct Scale {
    float down, k, inverse;
};

__device__ __forceinline__ Scale scale_of(Grid grid) {
    const float steps = (float)(LAST << FRACTION);
    return {power_of_two(127 - grid.biased), (float)grid.k, grid.m ? steps / (float)grid.m : 0.0f};
}

// T: the fused multiply-add rounds the exact product to an integer, since the unit of the last place of 2^23 is 1.
__device__ __forceinline__ int fixed_point(float v, Scale s) {
    return (int)__float_as_uint(__fmaf_rn(v * s.down - s.k, s.inverse, 8388608.0f)) - 0x4B000000;
}

struct Levels {
    float k, step, half, unit, special; // half: of a unit of T, for dithered rounding
    bool is_special;
};

__device__ __forceinline__ Levels levels_of(Grid grid) {
    Levels l;
    l.is_special = grid.biased == 255;
    l.special = __uint_as_float(grid.k == 0 ? 0x7FC00000u : grid.k == 1 ? INFINITE : INFINITE | 0x80000000u);
    l.k = (float)grid.k;
    l.step = (float)grid.m / (float)(LAST ? LAST : 1);
    l.half = l.step * power_of_two(-FRACTION - 1);
    l.unit = power_of_two(min(max(grid.biased, 1), 254) - 127);
    return l;
}

__device__ __forceinline__ float level(int code, Levels l) {
    return l.is_special ? l.special : saturate((l.k + (float)code * l.step) * l.unit);
}

// The 16 bits of a hash that a column of the block uses.
__device__ __forceinline__ u32 random_of(u32 hash, bool second) { return second ? hash >> 16 : hash & 0xFFFFu; }

// Of dithered rounding: the middle of the values that give a code.
__device__ __forceinline__ float middle(int code, u32 random, Levels l) {
    const int halves = ((code << FRACTION) - (int)(random >> (16 - FRACTION))) * 2 + (1 << FRACTION) - 1;
    return l.is_special ? l.special : saturate((l.k + (float)halves * l.half) * l.unit);
}

__device__ __forceinline__ u32 bfloat16_of(float v, u32 random, bool nearest) {
    const u32 word = __float_as_uint(v), magnitude = word & 0x7FFFFFFFu;
    u32 rounded = (magnitude + (nearest ? 0x7FFFu + (word >> 16 & 1) : random)) >> 16;
    rounded = magnitude < INFINITE ? min(rounded, 0x7F7Fu) : 0x7F80u;
    return magnitude > INFINITE ? 0x7FC0u : rounded | (word >> 16 & 0x8000u);
}

__device__ __forceinline__ i64 peer_of(i64 row, const i64* row_starts, i64 peers) {
    i64 low = 0, high = peers;  // the last peer whose first row is at most this one
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (row_starts[middle] <= row) low = middle;
        else high = middle;
    }
    // Peers without rows share a start with the next; the last of them is the one that has rows.
    return low;
}

// Where one row's values go once they have arrived.
struct Arrival {
    float *out, *state, *average;
    float part, weight;
    bool accumulate;
};

__device__ __forceinline__ void deliver(const Arrival& to, i64 c, float v) {
    if (to.state) {
        const float known = to.state[c], next = known + to.part * v;
        to.state[c] = finite(next) ? next : 0.0f;
        v = known + v;
    }
    if (to.average) {
        const float old = to.average[c];
        v = to.weight == 1.0f ? v : old + to.weight * (v - old);
        to.average[c] = finite(v) ? v : old;
    }
    to.out[c] = to.accumulate ? to.out[c] + v : v;
}

#include "encode.cuh"

#include "decode.cuh"
