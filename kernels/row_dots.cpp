// Products of the rows of heads with a few vectors, as additive attention scores nodes, and their gradients: each in one
// sweep over the rows. kernels/row_dots.py specifies it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SYLVIE_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define SYLVIE_CLONES
#endif

#define SYLVIE_INLINE static inline __attribute__((always_inline))

struct DotsCall {
    const void* x;        // T [rows, heads, dim]
    const void* vectors;  // T [count, heads, dim]
    const void* gradient; // T [count, rows, heads] of the products, or null: then out is the products
    void* out;            // T [count, rows, heads]; of the gradient T [rows, heads, dim], or null
    void* of_vectors;     // T [count, heads, dim] or null
    int64_t rows, heads, dim, count;
    int32_t is_double;
    int32_t threads;
};

namespace {

constexpr int64_t BLOCK = 256; // rows whose products with a gradient are summed in T before their sum is a double

template <class T> struct Lanes {
    static constexpr int W = 64 / int(sizeof(T));
    typedef T V __attribute__((vector_size(64)));
    typedef T Unaligned __attribute__((vector_size(64), aligned(alignof(T)), may_alias));
};

// The sum of all lanes: halves that lie together, until four lanes are left.
template <class T, int N> SYLVIE_INLINE T across(const T* lanes) {
    typedef T Half __attribute__((vector_size(N / 2 * sizeof(T))));
    Half low, high;
    std::memcpy(&low, lanes, sizeof(Half));
    std::memcpy(&high, lanes + N / 2, sizeof(Half));
    low += high;
    if constexpr (N == 4) {
        return low[0] + low[1];
    } else {
        T half[N / 2];
        std::memcpy(half, &low, sizeof(Half));
        return across<T, N / 2>(half);
    }
}

template <class T> SYLVIE_INLINE T dot(const T* a, const T* b, int64_t dim) {
    constexpr int W = Lanes<T>::W;
    using Unaligned = typename Lanes<T>::Unaligned;
    typename Lanes<T>::V sums{};
    int64_t d = 0;
    for (; d + W <= dim; d += W) sums += *reinterpret_cast<const Unaligned*>(a + d) * *reinterpret_cast<const Unaligned*>(b + d);
    T sum = 0;
    for (; d < dim; ++d) sum += a[d] * b[d];
    T lanes[W];
    std::memcpy(lanes, &sums, sizeof(lanes));
    return sum + across<T, W>(lanes);
}

template <class T> SYLVIE_INLINE void products(const DotsCall& call, int64_t from, int64_t to) {
    const int64_t width = call.heads * call.dim;
    const T *x = static_cast<const T*>(call.x), *vectors = static_cast<const T*>(call.vectors);
    T* out = static_cast<T*>(call.out);
    for (int64_t r = from; r < to; ++r)
        for (int64_t k = 0; k < call.count; ++k)
            for (int64_t h = 0; h < call.heads; ++h)
                out[(k * call.rows + r) * call.heads + h] =
                    dot(x + r * width + h * call.dim, vectors + k * width + h * call.dim, call.dim);
}

template <class T> SYLVIE_INLINE void gradients(const DotsCall& call, int64_t from, int64_t to, double* totals) {
    const int64_t width = call.heads * call.dim, dim = call.dim;
    const T *x = static_cast<const T*>(call.x), *vectors = static_cast<const T*>(call.vectors);
    const T* gradient = static_cast<const T*>(call.gradient);
    T* out = static_cast<T*>(call.out);
    std::vector<T> sums(call.of_vectors ? size_t(call.count * width) : 0);
    for (int64_t r = from; r < to; ++r) {
        for (int64_t k = 0; k < call.count; ++k)
            for (int64_t h = 0; h < call.heads; ++h) {
                const T given = gradient[(k * call.rows + r) * call.heads + h];
                if (out) {
                    const T* vector = vectors + k * width + h * dim;
                    T* into = out + r * width + h * dim;
                    if (k == 0)
                        for (int64_t d = 0; d < dim; ++d) into[d] = given * vector[d];
                    else
                        for (int64_t d = 0; d < dim; ++d) into[d] += given * vector[d];
                }
                if (call.of_vectors) {
                    const T* row = x + r * width + h * dim;
                    T* into = sums.data() + k * width + h * dim;
                    for (int64_t d = 0; d < dim; ++d) into[d] += given * row[d];
                }
            }
        if (call.of_vectors && ((r - from) % BLOCK == BLOCK - 1 || r + 1 == to))
            for (int64_t i = 0; i < call.count * width; ++i) {
                totals[i] += double(sums[size_t(i)]);
                sums[size_t(i)] = 0;
            }
    }
}

SYLVIE_CLONES void run(const DotsCall& call, int64_t from, int64_t to, double* totals) {
    if (call.is_double)
        call.gradient ? gradients<double>(call, from, to, totals) : products<double>(call, from, to);
    else
        call.gradient ? gradients<float>(call, from, to, totals) : products<float>(call, from, to);
}

} // namespace

extern "C" void sylvie_row_dots(const DotsCall* call) {
    const int64_t width = call->count * call->heads * call->dim;
    const int64_t worth = call->rows * std::max<int64_t>(width, 4) / (1 << 18);
    const int64_t threads = std::max<int64_t>(1, std::min<int64_t>({int64_t(call->threads), worth, call->rows}));
    std::vector<double> totals(call->of_vectors ? size_t(threads * width) : 0);
    auto work = [&](int64_t part) {
        run(*call, call->rows * part / threads, call->rows * (part + 1) / threads,
            call->of_vectors ? totals.data() + part * width : nullptr);
    };
    std::vector<std::thread> others;
    for (int64_t part = 1; part < threads; ++part) others.emplace_back(work, part);
    work(0);
    for (std::thread& other : others) other.join();
    if (!call->of_vectors) return;
    for (int64_t i = 0; i < width; ++i) {
        double sum = 0;
        for (int64_t part = 0; part < threads; ++part) sum += totals[size_t(part * width + i)];
        if (call->is_double)
            static_cast<double*>(call->of_vectors)[i] = sum;
        else
            static_cast<float*>(call->of_vectors)[i] = float(sum);
    }
}
