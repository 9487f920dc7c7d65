// Rows to row headers and codes, part of codec.cu.

// What one row's passes need to know, the same in all lanes.
struct Row {
    const float* x;
    float* state;
    u8* codes;
    i64 cols;
    int lane, variant;
    float part;
    bool nearest, dithered, two_means;
    u32 low, high;
    i64 mean;
    Scale scale;
    Levels levels;
};

__device__ __forceinline__ float source(const Row& row, i64 c) {
    const float v = row.x[c];
    if (!row.state) return v;
    return row.variant == DIFFERENCE ? v - row.state[c] : v + row.state[c];
}

__device__ __forceinline__ int code_of(const Row& row, float v, u32 random) {
    if (BITS == 16) return (int)bfloat16_of(v, random, row.nearest);
    if (row.levels.is_special) return 0;
    const int fixed = fixed_point(v, row.scale);
    if (row.two_means) return fixed > row.mean;
    const int threshold = row.nearest ? 1 << (FRACTION - 1) : (int)(random >> (16 - FRACTION));
    return min((fixed + threshold) >> FRACTION, LAST);
}

__device__ __forceinline__ void update_state(const Row& row, i64 c, float v, int code, u32 random) {
    const float value = BITS == 16     ? __uint_as_float((u32)code << 16)
                        : row.dithered ? middle(code, random, row.levels)
                                       : level(code, row.levels);
    const float next = row.variant == DIFFERENCE ? row.state[c] + row.part * value : v - value;
    row.state[c] = finite(next) ? next : 0.0f;
}

// Codes and packs one block of up to 64 columns. word: at one bit, the lane's word of this group of 16 blocks.
__device__ __forceinline__ void quantise64(const Row& row, i64 block, float first, float second, u32* word) {
    const i64 start = block * 64;
    const int n = (int)min(row.cols - start, (i64)64);
    const u32 hash = row.nearest ? 0 : hash_of(row.low, row.high, (u32)block * 32 + row.lane);
    const bool has_first = row.lane < n, has_second = row.lane + 32 < n;
    const int a = has_first ? code_of(row, first, random_of(hash, false)) : 0;
    const int b = has_second ? code_of(row, second, random_of(hash, true)) : 0;
    if (row.state) {
        if (has_first) update_state(row, start + row.lane, first, a, random_of(hash, false));
        if (has_second) update_state(row, start + 32 + row.lane, second, b, random_of(hash, true));
    }
    if (BITS == 1) {
        const u32 low_word = __ballot_sync(ALL, a), high_word = __ballot_sync(ALL, b);
        if (row.lane / 2 == (int)(block % 16)) *word = row.lane % 2 ? high_word : low_word;
        return;
    }
    u8* out = row.codes + block * 8 * BITS;
    const int bytes = (n * BITS + 7) / 8;
    if (BITS == 16) {  // rows of bfloat16 lie at even addresses
        if (has_first) ((unsigned short*)out)[row.lane] = (unsigned short)a;
        if (has_second) ((unsigned short*)out)[row.lane + 32] = (unsigned short)b;
    } else if (BITS == 8) {
        if (has_first) out[row.lane] = (u8)a;
        if (has_second) out[row.lane + 32] = (u8)b;
    } else if (BITS == 4 && n == 64) {
        out[row.lane] = (u8)(a | b << 4);
    } else if (BITS == 2 && n == 64) {
        const int pair = a | b << 4, next = __shfl_down_sync(ALL, pair, 16);
        if (row.lane < 16) out[row.lane] = (u8)(pair | next << 2);
    } else {  // the last, incomplete block: byte b takes columns b, b + bytes, b + 2 bytes, ...
        int packed = 0;
        for (int part = 0; part < 8 / BITS; ++part) {
            const int column = row.lane + part * bytes;
            const int in_first = __shfl_sync(ALL, a, column & 31), in_second = __shfl_sync(ALL, b, column & 31);
            if (column < n) packed |= (column < 32 ? in_first : in_second) << (part * BITS);
        }
        if (row.lane < bytes) out[row.lane] = (u8)packed;
    }
}

// Stores 32 words of one-bit codes, a word a lane, from word number start on.
__device__ __forceinline__ void store_words(const Row& row, i64 start, u32 word) {
    const i64 row_bytes = (row.cols + 7) / 8, byte = (start + row.lane) * 4;
    if (byte + 4 <= row_bytes && ((u64)(row.codes + byte) & 3) == 0)
        *(u32*)(row.codes + byte) = word;
    else
        for (int i = 0; i < 4 && byte + i < row_bytes; ++i) row.codes[byte + i] = (u8)(word >> (8 * i));
}

// Sums that two_means needs: of T, or of T above the mean and their number.
__device__ __forceinline__ void add_up(const Row& row, float v, i64* sum, i64* above, i64* count) {
    const int fixed = fixed_point(v, row.scale);
    *sum += fixed;
    *above += fixed > row.mean ? fixed : 0;
    *count += fixed > row.mean;
}

__device__ __forceinline__ i64 warp_sum(i64 v) {
    for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(ALL, v, lanes);
    return v;
}

#if BITS == 1
#include "rotate.cuh"
#endif

extern "C" __global__ void encode_rows(
    const float* __restrict__ x, i64 x_rows, i64 x_stride, const i64* rows, const i64* keys, float* state,
    const i64* row_starts, const i64* offsets, u8* buffer, i64 peers, i64 cols, u64 stream, u64 header_word, u64 step,
    int rounding, int variant, float part) {
    for (i64 p = (i64)blockIdx.x * blockDim.x + threadIdx.x; p < peers; p += (i64)gridDim.x * blockDim.x) {
        u64* header = (u64*)(buffer + offsets[p]);
        header[0] = header_word;
        header[1] = (u64)(row_starts[p + 1] - row_starts[p]);
        header[2] = (u64)cols;
        header[3] = step;
    }
    const i64 number = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (number >= row_starts[peers]) return;
    const i64 peer = peer_of(number, row_starts, peers), within = number - row_starts[peer];
    const i64 count = row_starts[peer + 1] - row_starts[peer], code_bytes = code_bytes_of(cols, rounding);
    u8* body = buffer + offsets[peer] + HEADER_BYTES;
    const i64 from = rows ? rows[number] : number;
    // An index out of bounds can not be reported without waiting for the device: the row arrives as NaN.
    const bool known = from >= 0 && from < x_rows;
    Row row;
    row.x = x + (known ? from : 0) * x_stride;
    row.state = state ? state + number * cols : nullptr;
    row.codes = body + ROW_HEADER_BYTES * count + code_bytes * within;
    row.cols = cols;
    row.lane = threadIdx.x & 31;
    row.variant = variant;
    row.part = part;
    row.nearest = rounding == NEAREST;
    row.dithered = rounding == DITHERED;
    row.two_means = false;
    row.mean = 0;
    row_words(stream, keys ? keys[number] : 0, &row.low, &row.high);
#if BITS == 1
    if (rounding == ROTATED) return encode_rotated(row, known, code_bytes, body + ROW_HEADER_BYTES * within);
#endif

    float held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const i64 c = row.lane + 32 * i;
        held[i] = c < cols ? (known ? source(row, c) : __uint_as_float(0x7FC00000u)) : 0.0f;
    }
    Grid grid = {0, 0, 1};
    if (BITS != 16) {
        float low = __uint_as_float(INFINITE), high = -low;
        bool nan = false;
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (row.lane + 32 * i < cols) {
                low = fminf(low, held[i]);
                high = fmaxf(high, held[i]);
                nan |= held[i] != held[i];
            }
        for (i64 c = row.lane + 32 * HELD; c < cols; c += 32) {
            const float v = source(row, c);
            low = fminf(low, v);
            high = fmaxf(high, v);
            nan |= v != v;
        }
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            low = fminf(low, __shfl_xor_sync(ALL, low, lanes));
            high = fmaxf(high, __shfl_xor_sync(ALL, high, lanes));
        }
        nan = __ballot_sync(ALL, nan) != 0 || !known;
        const bool plus = high > LARGEST, minus = low < -LARGEST;
        if (cols == 0 && known)
            grid = covering_grid(0.0f, 0.0f);
        else if (nan || plus || minus)
            grid = {nan || (plus && minus) ? 0 : plus ? 1 : 2, 0, 255};
        else
            grid = covering_grid(low, high);
        row.scale = scale_of(grid);
        if (BITS == 1 && row.nearest && grid.biased != 255) {
            i64 sum = 0, above = 0, upper = 0;
            for (int pass = 0; pass < 2; ++pass) {
                sum = above = upper = 0;
#pragma unroll
                for (int i = 0; i < HELD; ++i)
                    if (row.lane + 32 * i < cols) add_up(row, held[i], &sum, &above, &upper);
                for (i64 c = row.lane + 32 * HELD; c < cols; c += 32) add_up(row, source(row, c), &sum, &above, &upper);
                sum = warp_sum(sum);
                if (pass == 0) row.mean = cols ? sum / cols : 0;
            }
            above = warp_sum(above);
            upper = warp_sum(upper);
            if (upper > 0) {
                const float quantum = (float)grid.m * 1.52587890625e-05f, unit = power_of_two(grid.biased - 127);
                const float k = (float)grid.k;
                const float lower_mean = __ll2float_rn(sum - above) / __ll2float_rn(cols - upper);
                const float upper_mean = __ll2float_rn(above) / __ll2float_rn(upper);
                row.two_means = true;
                grid = covering_grid(saturate((k + lower_mean * quantum) * unit),
                                     saturate((k + upper_mean * quantum) * unit));
            }
        }
        if (row.lane == 0) {
            u8* header = body + ROW_HEADER_BYTES * within;
            *(u32*)header = (u32)(grid.k & 0xFFFF) | (u32)grid.m << 16 | (u32)grid.biased << 24;
        }
    }
    row.levels = levels_of(grid);

    u32 word = 0;
#pragma unroll
    for (int b = 0; b < HELD / 2; ++b)
        if (64 * b < cols) quantise64(row, b, held[2 * b], held[2 * b + 1], &word);
    for (i64 b = HELD / 2; 64 * b < cols; ++b) {
        if (BITS == 1 && b % 16 == 0) {
            store_words(row, 2 * (b - 16), word);
            word = 0;
        }
        const i64 c = 64 * b + row.lane;
        const float nan = __uint_as_float(0x7FC00000u);
        const float first = !known ? nan : c < cols ? source(row, c) : 0.0f;
        const float second = !known ? nan : c + 32 < cols ? source(row, c + 32) : 0.0f;
        quantise64(row, b, first, second, &word);
    }
    if (BITS == 1 && cols > 0) store_words(row, (cols - 1) / 1024 * 32, word);
}
