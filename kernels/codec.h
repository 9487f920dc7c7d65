// The C face of the CPU codec: plain structures and functions, called through ctypes with raw pointers, so that
// nothing depends on a version of Python or torch, and the interpreter's lock is released during a call.
// The fields mirror kernels/cpu.py; kernels/reference.py specifies what is computed.
#pragma once
#include <cstdint>

enum Rounding : int32_t { STOCHASTIC = 0, NEAREST = 1, DITHERED = 2, ROTATED = 3 };
enum Variant : int32_t { PLAIN = 0, DIFFERENCE = 1, FEEDBACK = 2 };

struct Messages {              // where the messages of one exchange lie in one buffer
    const int64_t* row_starts; // [peers + 1] number of each message's first row; need not begin at 0
    const int64_t* offsets;    // [peers] byte at which each message starts
    uint8_t* buffer;
    int64_t peers;
    int64_t cols;
    int32_t bits;    // 1, 2, 4, 8, 16
    int32_t threads; // at least 1
    int32_t isa;     // the best instruction set to use: 0 baseline, 2 AVX2, 3 AVX-512
    float part;      // of a decoded difference, that the reconstruction moves by
};

struct EncodeCall {
    Messages messages;
    const float* x;       // [x_rows] rows, x_stride floats apart
    int64_t x_rows;
    int64_t x_stride;
    const int64_t* rows;  // [rows] or null: all in order
    const int64_t* keys;  // [rows] or null: all zero
    float* state;         // [rows, cols] or null
    uint64_t stream;      // hashing.stream_word
    uint64_t header_word; // first word of the header
    uint64_t step;        // last word of the header
    int32_t rounding;
    int32_t variant;
};

struct DecodeCall {
    Messages messages;
    float* out;           // [out_rows] rows, out_stride floats apart
    int64_t out_rows;
    int64_t out_stride;
    const int64_t* index; // [rows] or null: in order
    const int64_t* keys;  // [rows] of dithered and rotated rounding, or null
    uint64_t stream;
    float* state;         // [rows, cols] or null
    float* average;       // [rows, cols] or null
    float weight;
    int32_t accumulate;
    int32_t rounding;
};

// Both return -1, or the first row (of all messages) whose index is out of bounds; that row was left out.
extern "C" int64_t sylvie_encode(const EncodeCall* call);
extern "C" int64_t sylvie_decode(const DecodeCall* call);
extern "C" int32_t sylvie_isa(); // the best instruction set of this machine
