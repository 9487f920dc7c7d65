// The CPU codec: gathers rows, quantises and packs them into messages in one sweep, and back. Calls are split over
// threads by rows. What happens to one row stands in the .inc files, compiled once for each instruction set.
#include "codec.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own headers of AVX-512 start from a value left undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define SYLVIE_X86 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

struct RowWords { // hashing.row_words
    uint32_t low, high;
};

struct Receiver { // where one row's values go
    float* state;   // or null
    float part;
    float* average; // or null
    float weight;
    float* out;
    bool accumulate;
};

constexpr int ROW_BATCH = 8; // rows that are encoded together at most

struct EncodeBatch {
    int count;
    int64_t cols;
    bool nearest, dithered, rotated;
    const float* x[ROW_BATCH];
    uint8_t* headers[ROW_BATCH];
    uint8_t* codes[ROW_BATCH];
    RowWords words[ROW_BATCH];
    const float* next[ROW_BATCH]; // rows to prefetch, or null
    bool keeps;                   // a state; what follows has a meaning with one only
    bool difference;              // else error feedback
    float part;
    float* state[ROW_BATCH];
    float* targets; // scratch: a batch of rows
    float* values;  // scratch: a row
};

// Numbers that a row is filled up to where it is rotated.
inline int64_t rotated_width(int64_t cols) {
    int64_t width = 32;
    while (width < cols) width *= 2;
    return width;
}

struct RowKernels {
    void (*encode)(int32_t bits, EncodeBatch& rows);
    void (*decode)(int32_t bits, const uint8_t* header, const uint8_t* codes, int64_t cols, int32_t rounding, RowWords words,
                   const Receiver& to);
};

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rows between the one in work and the one that is fetched. Fetching into the second-level cache is what counts: random
// rows of 1 KiB were read at 19 GB/s so, at 10 GB/s when fetched into the first level, which tracks fewer misses.
constexpr int64_t AHEAD = 16;

template <bool WRITTEN = false> inline void prefetch_row(const float* row, int64_t cols) {
#ifdef __GNUC__
    const int64_t lines = std::min<int64_t>((cols + 15) / 16, 64);
    for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(row + 16 * line, WRITTEN, 2);
#endif
}

namespace baseline {
#define SYLVIE_ISA 0
#define SYLVIE_TARGET
#include "codec_isa.inc"
#undef SYLVIE_TARGET
#undef SYLVIE_ISA
} // namespace baseline

#ifdef SYLVIE_X86
namespace avx2 {
#define SYLVIE_ISA 2
#define SYLVIE_TARGET __attribute__((target("avx2,fma,bmi2")))
#include "codec_isa.inc"
#undef SYLVIE_TARGET
#undef SYLVIE_ISA
} // namespace avx2

namespace avx512 {
#define SYLVIE_ISA 3
#if defined(__clang__)
#define SYLVIE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi2")))
#else // GCC prefers half registers unless told
#define SYLVIE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi2,prefer-vector-width=512")))
#endif
#include "codec_isa.inc"
#undef SYLVIE_TARGET
#undef SYLVIE_ISA
} // namespace avx512
#endif

const RowKernels& kernels_for(int32_t isa) {
#ifdef SYLVIE_X86
    const int32_t best = std::min(isa, sylvie_isa());
    if (best >= 3) return avx512::kernels;
    if (best >= 2) return avx2::kernels;
#endif
    (void)isa;
    return baseline::kernels;
}

RowWords row_words(uint64_t stream, int64_t key) {
    uint64_t word = uint64_t(key) * 0x9E3779B97F4A7C15ull + stream;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ word >> 27) * 0x94D049BB133111EBull;
    word ^= word >> 31;
    return {uint32_t(word), uint32_t(word >> 32)};
}

constexpr int64_t HEADER_BYTES = 32;

// Where one row's header and codes stand. Rows are visited in order, so the peer is found by stepping on.
class Cursor {
  public:
    Cursor(const Messages& messages, int32_t rounding, int64_t row) : m(messages) {
        header_width = m.bits <= 8 ? 4 : 0;
        code_width = ((rounding == ROTATED ? rotated_width(m.cols) : m.cols) * m.bits + 7) / 8;
        peer = std::upper_bound(m.row_starts, m.row_starts + m.peers + 1, row) - m.row_starts - 1;
    }
    void seek(int64_t row) {
        while (row >= m.row_starts[peer + 1]) ++peer;
        const int64_t within = row - m.row_starts[peer], count = m.row_starts[peer + 1] - m.row_starts[peer];
        uint8_t* body = m.buffer + m.offsets[peer] + HEADER_BYTES;
        header = body + header_width * within;
        codes = body + header_width * count + code_width * within;
    }
    uint8_t* header;
    uint8_t* codes;

  private:
    const Messages& m;
    int64_t peer, header_width, code_width;
};

// Calls work(first, last) on the calling thread and others, until all rows of all messages are done. Threads take small
// shares as they come: one that has to share its core (with torch's own threads, say) does not hold up the others.
template <class Work> void split_rows(const Messages& m, const Work& work) {
    const int64_t start = m.row_starts[0], rows = m.row_starts[m.peers] - start;
    const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(m.threads, rows));
    if (threads == 1) return work(start, start + rows);
    const int64_t share = std::max<int64_t>(4 * AHEAD, rows / (16 * threads) + 1);
    std::atomic<int64_t> next{0};
    const auto take = [&] {
        for (int64_t first; (first = next.fetch_add(share)) < rows;)
            work(start + first, start + std::min(first + share, rows));
    };
    std::vector<std::thread> others;
    try {
        for (int64_t t = 1; t < threads; ++t) others.emplace_back(take);
    } catch (const std::system_error&) {
        // No more threads to be had: those there are take all shares.
    }
    take();
    for (std::thread& other : others) other.join();
}

void note_bad_row(std::atomic<int64_t>& bad, int64_t row) {
    int64_t seen = -1;
    bad.compare_exchange_strong(seen, row);
}

} // namespace

int32_t sylvie_isa() {
#ifdef SYLVIE_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2"))
        return 3;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return 2;
#endif
    return 0;
}

int64_t sylvie_encode(const EncodeCall* call) {
    const Messages& m = call->messages;
    const RowKernels& kernels = kernels_for(m.isa);
    std::atomic<int64_t> bad{-1};
    for (int64_t peer = 0; peer < m.peers; ++peer) {
        const uint64_t words[4] = {call->header_word, uint64_t(m.row_starts[peer + 1] - m.row_starts[peer]),
                                   uint64_t(m.cols), call->step};
        std::memcpy(m.buffer + m.offsets[peer], words, HEADER_BYTES);
    }
    // A batch should stay in the first-level cache between its stages.
    const int64_t fitting = 24576 / (4 * std::max<int64_t>(m.cols, 1));
    const int64_t batch = std::max<int64_t>(1, std::min<int64_t>(ROW_BATCH, fitting));
    split_rows(m, [&](int64_t first, int64_t last) {
        std::vector<float> scratch(call->state ? size_t((batch + 1) * m.cols) : 0);
        EncodeBatch rows;
        rows.cols = m.cols;
        rows.nearest = call->rounding == NEAREST;
        rows.dithered = call->rounding == DITHERED;
        rows.rotated = call->rounding == ROTATED;
        rows.keeps = call->state != nullptr;
        rows.difference = call->variant == DIFFERENCE;
        rows.part = m.part;
        rows.targets = scratch.data();
        rows.values = scratch.data() + (call->state ? batch * m.cols : 0);
        Cursor at(m, call->rounding, first);
        for (int64_t start = first; start < last; start += batch) {
            rows.count = 0;
            for (int64_t i = start; i < std::min(start + batch, last); ++i) {
                const int64_t row = call->rows ? call->rows[i] : i;
                if (row < 0 || row >= call->x_rows) {
                    note_bad_row(bad, i);
                    continue;
                }
                const int r = rows.count++;
                at.seek(i);
                rows.x[r] = call->x + row * call->x_stride;
                rows.headers[r] = at.header;
                rows.codes[r] = at.codes;
                rows.words[r] = row_words(call->stream, call->keys ? call->keys[i] : 0);
                const int64_t ahead = call->rows && i + AHEAD < last ? call->rows[i + AHEAD] : -1;
                rows.next[r] = ahead >= 0 && ahead < call->x_rows ? call->x + ahead * call->x_stride : nullptr;
                if (!call->state) continue;
                rows.state[r] = call->state + i * m.cols;
                if (i + AHEAD < last) prefetch_row<true>(call->state + (i + AHEAD) * m.cols, m.cols);
            }
            kernels.encode(m.bits, rows);
        }
    });
    return bad;
}

int64_t sylvie_decode(const DecodeCall* call) {
    const Messages& m = call->messages;
    const RowKernels& kernels = kernels_for(m.isa);
    std::atomic<int64_t> bad{-1};
    const bool keyed = call->rounding == DITHERED || call->rounding == ROTATED;
    split_rows(m, [&](int64_t first, int64_t last) {
        Cursor at(m, call->rounding, first);
        for (int64_t i = first; i < last; ++i) {
            const int64_t row = call->index ? call->index[i] : i;
            if (row < 0 || row >= call->out_rows) {
                note_bad_row(bad, i);
                continue;
            }
            if (call->index && i + AHEAD < last) {
                const int64_t ahead = call->index[i + AHEAD];
                if (ahead >= 0 && ahead < call->out_rows) prefetch_row(call->out + ahead * call->out_stride, m.cols);
            }
            at.seek(i);
            const RowWords words = keyed ? row_words(call->stream, call->keys ? call->keys[i] : 0) : RowWords{};
            kernels.decode(m.bits, at.header, at.codes, m.cols, call->rounding, words,
                           {call->state ? call->state + i * m.cols : nullptr, m.part,
                            call->average ? call->average + i * m.cols : nullptr, call->weight,
                            call->out + row * call->out_stride, call->accumulate != 0});
        }
    });
    return bad;
}
