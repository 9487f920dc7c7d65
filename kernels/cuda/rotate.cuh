// Rotated rounding, as rotation.py specifies it, part of codec.cu at one bit. Lane l holds columns l, l + 32, ...: a row has
// N numbers a lane, those behind its own zero.

template <int N> __device__ __forceinline__ void hadamard(float* v, int lane) {
#pragma unroll
    for (int distance = N / 2; distance; distance /= 2)
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (!(i & distance)) {
                const float low = v[i], high = v[i + distance];
                v[i] = low + high;
                v[i + distance] = low - high;
            }
#pragma unroll
    for (int i = 0; i < N; ++i)
        for (int distance = 16; distance; distance /= 2) {
            const float other = __shfl_xor_sync(ALL, v[i], distance);
            v[i] = lane & distance ? other - v[i] : v[i] + other;
        }
}

// The sum of numbers that are overwritten, the second half added to the first until one is left; the same in all lanes.
template <int N> __device__ __forceinline__ float sum_by_halves(float* v) {
#pragma unroll
    for (int half = N / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) v[i] += v[i + half];
    float sum = v[0];
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(ALL, sum, distance);
    return sum;
}

// Flips random signs: bit l of hash i is that of column 32 i + l, and lane i computes hash i.
template <int N> __device__ __forceinline__ void flip(float* v, u32 low, u32 high, int lane) {
    const u32 hash = hash_of(low, high, (u32)lane);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u32 signs = __shfl_sync(ALL, hash, i);
        v[i] = __uint_as_float(__float_as_uint(v[i]) ^ (signs >> lane & 1) << 31);
    }
}

template <int N> __device__ __forceinline__ void rotate_back(float* v, float scale, u32 low, u32 high, int lane) {
    hadamard<N>(v, lane);
    flip<N>(v, low, high, lane);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = saturate(v[i] * scale);
}

// Codes one row; its header is at `header`. known: whether there is such a row.
template <int N> __device__ void encode_rotated(const Row& row, bool known, u8* header) {
    float v[N], terms[N];
    float low = __uint_as_float(INFINITE), high = -low;
    bool nan = !known;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        v[i] = known && row.lane + 32 * i < row.cols ? source(row, row.lane + 32 * i) : 0.0f;
        low = fminf(low, v[i]);
        high = fmaxf(high, v[i]);
        nan |= v[i] != v[i];
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        low = fminf(low, __shfl_xor_sync(ALL, low, lanes));
        high = fmaxf(high, __shfl_xor_sync(ALL, high, lanes));
    }
    nan = __ballot_sync(ALL, nan) != 0;
    const bool plus = high > LARGEST, minus = low < -LARGEST;
    float scale = 0.0f;
    u32 word = 0;
    if (nan || plus || minus) {
        scale = __uint_as_float(nan || (plus && minus) ? 0x7FC00000u : plus ? INFINITE : INFINITE | 0x80000000u);
        if (row.state)
            for (int c = row.lane; c < row.cols; c += 32) row.state[c] = 0.0f;
    } else {
        const int exponent = max(-126, min(exponent_of(fmaxf(fabsf(low), fabsf(high))), 126));
        const float down = power_of_two(-exponent);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] *= down;
        flip<N>(v, row.low, row.high, row.lane);
#pragma unroll
        for (int i = 0; i < N; ++i) terms[i] = v[i] * v[i];
        const float size = sum_by_halves<N>(terms);
        hadamard<N>(v, row.lane);
#pragma unroll
        for (int i = 0; i < N; ++i) terms[i] = fabsf(v[i]);
        const float spread = sum_by_halves<N>(terms);
        if (spread > 0.0f) scale = saturate(size / spread * power_of_two(exponent));
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u32 codes = __ballot_sync(ALL, v[i] >= 0.0f);
            if (row.lane == i) word = codes;
            v[i] = v[i] >= 0.0f ? 1.0f : -1.0f;
        }
        if (row.state) {
            rotate_back<N>(v, scale, row.low, row.high, row.lane);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (row.lane + 32 * i >= row.cols) continue;
                float* at = row.state + row.lane + 32 * i;
                const float next = *at + row.part * v[i];
                *at = finite(next) ? next : 0.0f;
            }
        }
    }
    if (row.lane < N) ((u32*)row.codes)[row.lane] = word; // rows of whole words behind headers of one word
    if (row.lane == 0) *(u32*)header = __float_as_uint(scale);
}

template <int N>
__device__ void decode_rotated(float scale, const u8* codes, i64 cols, u32 low, u32 high, int lane, const Arrival& to) {
    float v[N];
    const u32 word = lane < N ? ((const u32*)codes)[lane] : 0;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = __shfl_sync(ALL, word, i) >> lane & 1 ? 1.0f : -1.0f;
    rotate_back<N>(v, scale, low, high, lane);
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (lane + 32 * i < cols) deliver(to, lane + 32 * i, finite(scale) ? v[i] : scale);
}

__device__ void encode_rotated(const Row& row, bool known, i64 code_bytes, u8* header) {
    switch (8 * code_bytes) {
    case 32: return encode_rotated<1>(row, known, header);
    case 64: return encode_rotated<2>(row, known, header);
    case 128: return encode_rotated<4>(row, known, header);
    case 256: return encode_rotated<8>(row, known, header);
    case 512: return encode_rotated<16>(row, known, header);
    default: return encode_rotated<32>(row, known, header);
    }
}

__device__ void decode_rotated(float scale, const u8* codes, i64 cols, u32 low, u32 high, int lane, const Arrival& to) {
    switch (8 * code_bytes_of(cols, ROTATED)) {
    case 32: return decode_rotated<1>(scale, codes, cols, low, high, lane, to);
    case 64: return decode_rotated<2>(scale, codes, cols, low, high, lane, to);
    case 128: return decode_rotated<4>(scale, codes, cols, low, high, lane, to);
    case 256: return decode_rotated<8>(scale, codes, cols, low, high, lane, to);
    case 512: return decode_rotated<16>(scale, codes, cols, low, high, lane, to);
    default: return decode_rotated<32>(scale, codes, cols, low, high, lane, to);
    }
}
