// kernels/cuda/codec.cu behind a C face, its warps emulated: compiled by the tests with -DSYLVIE_BITS=...
#include "warp.h"

#include "../../../kernels/cuda/codec.cu"

extern "C" void emulate_encode(unsigned blocks, unsigned threads, const float* x, i64 x_rows, i64 x_stride,
                               const i64* rows, const i64* keys, float* state, const i64* row_starts,
                               const i64* offsets, u8* buffer, i64 peers, i64 cols, u64 stream, u64 header_word,
                               u64 step, int rounding, int variant, float part) {
    launch(blocks, threads, [=] {
        encode_rows(x, x_rows, x_stride, rows, keys, state, row_starts, offsets, buffer, peers, cols, stream,
                    header_word, step, rounding, variant, part);
    });
}

extern "C" void emulate_decode(unsigned blocks, unsigned threads, const u8* buffer, const i64* row_starts,
                               const i64* offsets, i64 peers, i64 cols, u64 header_word, u64 step, int any_step,
                               float* out, i64 out_rows, i64 out_stride, const i64* index, float* state,
                               float part, float* average, float weight, int accumulate,
                               const i64* keys, u64 stream, int rounding) {
    launch(blocks, threads, [=] {
        decode_rows(buffer, row_starts, offsets, peers, cols, header_word, step, any_step, out, out_rows, out_stride,
                    index, state, part, average, weight, accumulate, keys, stream, rounding);
    });
}
