// Dropout whose mask is a function of (key, global row, column), in one sweep; sylvie_fx/ir/ops.py, keep_mask,
// specifies which entries stay. The compiler's own vectors serve: an entry is two 32-bit products and some shifts.
#include "keyed_mask.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SYLVIE_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define SYLVIE_CLONES
#endif

struct DropoutCall {
    const void* x;       // T [rows, columns]; in the backward pass behind a ReLU, what the forward pass gave
    const void* gradient; // T [rows, columns] in the backward pass behind a ReLU, else null
    void* out;           // T [rows, columns]
    const int64_t* keys; // [rows] global row indices
    int64_t rows, columns;
    uint64_t key;
    double scale;       // of entries that stay
    uint32_t threshold; // entries whose number is below go
    int32_t is_double;
    int32_t threads;
    int32_t relu; // whether negative entries are zero first
};

namespace {

constexpr int64_t BLOCK = 1024; // entries in work at once, whose numbers stay in the cache

// Numbers of rows before their columns are mixed in.
SYLVIE_CLONES void number_rows(const int64_t* keys, int64_t rows, uint64_t key, uint32_t* numbers) {
    for (int64_t r = 0; r < rows; ++r) numbers[r] = row_number(keys[r], key);
}

// One row; the floor is zero for a ReLU, or minus infinity.
template <class T>
inline void drop(const T* x, T* out, uint32_t row, int64_t columns, uint32_t threshold, T scale, T floor) {
    for (int64_t c = 0; c < columns; ++c)
        out[c] = (x[c] < floor ? floor : x[c]) * (mix(entry_number(row, uint32_t(c))) >= threshold ? scale : T(0));
}

// Entries whose numbers are at hand but for the last mixing: narrow rows, several in one vector.
template <class T>
inline void drop_flat(const T* x, T* out, const uint32_t* numbers, int64_t count, uint32_t threshold, T scale, T floor) {
    for (int64_t i = 0; i < count; ++i)
        out[i] = (x[i] < floor ? floor : x[i]) * (mix(numbers[i]) >= threshold ? scale : T(0));
}

// Behind a ReLU what stayed is above zero, so the mask need not be drawn again.
template <class T> inline void return_flat(const T* result, const T* gradient, T* out, int64_t count, T scale) {
    for (int64_t i = 0; i < count; ++i) out[i] = result[i] <= T(0) ? T(0) : gradient[i] * scale;
}

SYLVIE_CLONES void wide(const float* x, float* out, uint32_t row, int64_t columns, uint32_t threshold, float scale,
                        float floor) {
    drop(x, out, row, columns, threshold, scale, floor);
}

SYLVIE_CLONES void wide(const double* x, double* out, uint32_t row, int64_t columns, uint32_t threshold, double scale,
                        double floor) {
    drop(x, out, row, columns, threshold, scale, floor);
}

SYLVIE_CLONES void narrow(const float* x, float* out, const uint32_t* numbers, int64_t count, uint32_t threshold,
                          float scale, float floor) {
    drop_flat(x, out, numbers, count, threshold, scale, floor);
}

SYLVIE_CLONES void narrow(const double* x, double* out, const uint32_t* numbers, int64_t count, uint32_t threshold,
                          double scale, double floor) {
    drop_flat(x, out, numbers, count, threshold, scale, floor);
}

SYLVIE_CLONES void give_back(const float* result, const float* gradient, float* out, int64_t count, float scale) {
    return_flat(result, gradient, out, count, scale);
}

SYLVIE_CLONES void give_back(const double* result, const double* gradient, double* out, int64_t count, double scale) {
    return_flat(result, gradient, out, count, scale);
}

template <class T> void drop_rows(const DropoutCall& call, int64_t from, int64_t to) {
    const int64_t columns = call.columns, at_once = std::max<int64_t>(1, BLOCK / std::max<int64_t>(columns, 1));
    const T* x = static_cast<const T*>(call.x);
    T* out = static_cast<T*>(call.out);
    const T scale = T(call.scale), floor = call.relu ? T(0) : -std::numeric_limits<T>::infinity();
    if (call.gradient) {
        const T* gradient = static_cast<const T*>(call.gradient);
        return give_back(x + from * columns, gradient + from * columns, out + from * columns, (to - from) * columns, scale);
    }
    uint32_t rows[BLOCK], entries[BLOCK];
    for (int64_t begin = from; begin < to; begin += at_once) {
        const int64_t count = std::min(at_once, to - begin);
        number_rows(call.keys + begin, count, call.key, rows);
        if (columns >= 32) {
            for (int64_t r = 0; r < count; ++r)
                wide(x + (begin + r) * columns, out + (begin + r) * columns, rows[r], columns, call.threshold, scale, floor);
            continue;
        }
        uint32_t* entry = entries;
        for (int64_t r = 0; r < count; ++r)
            for (uint32_t c = 0; c < uint32_t(columns); ++c) *entry++ = entry_number(rows[r], c);
        narrow(x + begin * columns, out + begin * columns, entries, count * columns, call.threshold, scale, floor);
    }
}

} // namespace

extern "C" void sylvie_dropout(const DropoutCall* call) {
    const int64_t worth = call->rows * std::max<int64_t>(call->columns, 4) / (1 << 18);
    const int64_t threads = std::max<int64_t>(1, std::min<int64_t>({int64_t(call->threads), worth, call->rows}));
    auto work = [&](int64_t part) {
        const int64_t from = call->rows * part / threads, to = call->rows * (part + 1) / threads;
        if (call->is_double)
            drop_rows<double>(*call, from, to);
        else
            drop_rows<float>(*call, from, to);
    };
    std::vector<std::thread> others;
    for (int64_t part = 1; part < threads; ++part) others.emplace_back(work, part);
    work(0);
    for (std::thread& other : others) other.join();
}
