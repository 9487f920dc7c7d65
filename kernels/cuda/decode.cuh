// Row headers and codes to rows, part of codec.cu.

extern "C" __global__ void decode_rows(
    const u8* buffer, const i64* row_starts, const i64* offsets, i64 peers, i64 cols, u64 header_word, u64 step,
    int any_step, float* out, i64 out_rows, i64 out_stride, const i64* index, float* state, float part, float* average,
    float weight, int accumulate, const i64* keys, u64 stream, int rounding) {
    const i64 first_row = row_starts[0], thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 number = first_row + thread / 32;
    if (number >= row_starts[peers]) return;
    const i64 peer = peer_of(number, row_starts, peers), within = number - row_starts[peer];
    const i64 count = row_starts[peer + 1] - row_starts[peer], code_bytes = code_bytes_of(cols, rounding);
    const u64* header = (const u64*)(buffer + offsets[peer]);
    const u8* body = buffer + offsets[peer] + HEADER_BYTES;
    const u8* codes = body + ROW_HEADER_BYTES * count + code_bytes * within;
    const i64 to = index ? index[number] : number;
    if (to < 0 || to >= out_rows) return;
    const Arrival arrival = {out + to * out_stride, state ? state + number * cols : nullptr,
                             average ? average + number * cols : nullptr, part, weight, accumulate != 0};
    // A message that is not the expected one can not be reported without waiting for the device: it reads as NaN.
    const bool expected = header[0] == header_word && header[1] == (u64)count && header[2] == (u64)cols &&
                          (any_step || header[3] == step);
    const int lane = (int)(threadIdx.x & 31);
    u32 low = 0, high = 0;
    if (rounding == DITHERED || rounding == ROTATED) row_words(stream, keys ? keys[number] : 0, &low, &high);
#if BITS == 1
    if (rounding == ROTATED) {
        const u32 scale = expected ? *(const u32*)(body + ROW_HEADER_BYTES * within) : 0x7FC00000u;
        return decode_rotated(__uint_as_float(scale), codes, cols, low, high, lane, arrival);
    }
#endif
    Levels levels;
    if (BITS != 16) {
        const u32 fields = expected ? *(const u32*)(body + ROW_HEADER_BYTES * within) : 0xFF000000u;
        const int k = (int)(fields << 16) >> 16;
        levels = levels_of({k, (int)(fields >> 16 & 255), (int)(fields >> 24)});
    }
    const bool dithered = rounding == DITHERED;
#pragma unroll 2
    for (i64 start = 0; start < cols; start += 64) {
        const u32 hash = dithered ? hash_of(low, high, (u32)(start / 2) + lane) : 0;
        const int n = (int)min(cols - start, (i64)64), bytes = (n * BITS + 7) / 8;
#pragma unroll
        for (int part_of = 0; part_of < 2; ++part_of) {
            const int within_block = lane + 32 * part_of;
            const i64 c = start + within_block;
            if (within_block >= n) continue;
            float v;
            if (BITS == 16) {
                v = __uint_as_float(expected ? (u32)((const unsigned short*)codes)[c] << 16 : 0x7FC00000u);
            } else {
                const int code = BITS == 1 ? codes[c >> 3] >> (c & 7) & 1
                                           : codes[start / 8 * BITS + within_block % bytes] >> (within_block / bytes * BITS) & LAST;
                v = dithered ? middle(code, random_of(hash, part_of != 0), levels) : level(code, levels);
            }
            deliver(arrival, c, v);
        }
    }
}
