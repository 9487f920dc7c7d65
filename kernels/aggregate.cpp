// The CPU kernels of the neighbour aggregations: one sweep over the edges sorted by row, nothing of size edges x values
// in between. Calls are split over threads by rows. What happens to a row stands in the .inc files, compiled once for
// each instruction set.
#include "aggregate.h"
#include "keyed_mask.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" // vectors are passed between inlined functions only
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define SYLVIE_X86 1
#endif

namespace {

// Rows between the one in work and the one that is fetched: about 8 KiB of rows in flight.
inline int64_t rows_ahead(int64_t row_bytes) {
    return std::max<int64_t>(4, std::min<int64_t>(64, 8192 / std::max<int64_t>(row_bytes, 1)));
}

// Rows are handed out in pieces of about as many edges, more pieces than threads, so that a slow core holds nobody up.
// Which thread takes a piece changes nothing in what is computed.
template <class Work> void split_rows(const Rows& rows, const Run& run, int64_t row_values, const Work& work) {
    const int64_t edges = rows.indptr[rows.rows], cost = edges + rows.rows;
    const int64_t worth = cost * std::max<int64_t>(row_values, 4) / (1 << 17); // threads for which there is work
    const int64_t threads = std::max<int64_t>(1, std::min<int64_t>({run.threads, worth, rows.rows}));
    if (threads == 1) return work(int64_t(0), rows.rows);
    const int64_t pieces = std::min(threads * 8, rows.rows);
    // First row of which it and all edges before it cost at least the piece's share; edges before a row only grow.
    auto start_of = [&](int64_t piece) {
        int64_t low = 0, high = rows.rows;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (rows.indptr[middle] + middle < cost * piece / pieces)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    };
    std::atomic<int64_t> next{0};
    auto take = [&] {
        for (int64_t piece = next++; piece < pieces; piece = next++)
            work(start_of(piece), piece + 1 == pieces ? rows.rows : start_of(piece + 1));
    };
    std::vector<std::thread> others;
    for (int64_t t = 1; t < threads; ++t) others.emplace_back(take);
    take();
    for (std::thread& other : others) other.join();
}

struct Kernels {
    void (*sum)(const Rows&, const Run&, const SumCall&);
    void (*extreme)(const Rows&, const Run&, const ExtremeCall&);
    void (*ties)(const Rows&, const Run&, const TiesCall&);
    void (*edges)(const Rows&, const Run&, const EdgeCall&);
    void (*softmax)(const Rows&, const Run&, const SoftmaxCall&);
    void (*attention)(const Rows&, const Run&, const AttentionCall&);
    void (*sources)(const Rows&, const Run&, const SourcesCall&);
    void (*scores)(const Rows&, const Run&, const ScoresCall&);
};

namespace baseline {
#define SYLVIE_BYTES 16
#define SYLVIE_TARGET
#include "aggregate_isa.inc"
#undef SYLVIE_TARGET
#undef SYLVIE_BYTES
} // namespace baseline

#ifdef SYLVIE_X86
namespace avx2 {
#define SYLVIE_BYTES 32
#define SYLVIE_TARGET __attribute__((target("avx2,fma,bmi2")))
#include "aggregate_isa.inc"
#undef SYLVIE_TARGET
#undef SYLVIE_BYTES
} // namespace avx2

namespace avx512 {
#define SYLVIE_BYTES 64
#if defined(__clang__)
#define SYLVIE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,bmi2")))
#else // GCC prefers half registers unless told
#define SYLVIE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,bmi2,prefer-vector-width=512")))
#endif
#include "aggregate_isa.inc"
#undef SYLVIE_TARGET
#undef SYLVIE_BYTES
} // namespace avx512
#endif

const Kernels& kernels_for(const Run& run) {
    const bool wide = run.is_double;
#ifdef SYLVIE_X86
    const int32_t best = std::min(run.isa, sylvie_aggregate_isa());
    if (best >= 3) return wide ? avx512::KERNELS<double> : avx512::KERNELS<float>;
    if (best >= 2) return wide ? avx2::KERNELS<double> : avx2::KERNELS<float>;
#endif
    return wide ? baseline::KERNELS<double> : baseline::KERNELS<float>;
}

} // namespace

int32_t sylvie_aggregate_isa() {
#ifdef SYLVIE_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return 3;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return 2;
#endif
    return 0;
}

int64_t sylvie_aggregate_sizes() {
    int64_t sizes = 0;
    for (size_t size :
         {sizeof(Rows), sizeof(Run), sizeof(SumCall), sizeof(ExtremeCall), sizeof(TiesCall), sizeof(EdgeCall),
          sizeof(SoftmaxCall), sizeof(AttentionCall), sizeof(SourcesCall), sizeof(ScoresCall)})
        sizes = (sizes * 113 + int64_t(size)) % (int64_t(1) << 31);
    return sizes;
}

void sylvie_aggregate_sum(const Rows* rows, const Run* run, const SumCall* call) {
    kernels_for(*run).sum(*rows, *run, *call);
}

void sylvie_aggregate_extreme(const Rows* rows, const Run* run, const ExtremeCall* call) {
    kernels_for(*run).extreme(*rows, *run, *call);
}

void sylvie_aggregate_ties(const Rows* rows, const Run* run, const TiesCall* call) {
    kernels_for(*run).ties(*rows, *run, *call);
}

void sylvie_aggregate_edges(const Rows* rows, const Run* run, const EdgeCall* call) {
    kernels_for(*run).edges(*rows, *run, *call);
}

void sylvie_aggregate_softmax(const Rows* rows, const Run* run, const SoftmaxCall* call) {
    kernels_for(*run).softmax(*rows, *run, *call);
}

void sylvie_aggregate_attention(const Rows* rows, const Run* run, const AttentionCall* call) {
    kernels_for(*run).attention(*rows, *run, *call);
}

void sylvie_aggregate_sources(const Rows* rows, const Run* run, const SourcesCall* call) {
    kernels_for(*run).sources(*rows, *run, *call);
}

void sylvie_aggregate_scores(const Rows* rows, const Run* run, const ScoresCall* call) {
    kernels_for(*run).scores(*rows, *run, *call);
}
